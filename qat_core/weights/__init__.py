"""The weight stream from a trainer to an engine or a file: names, layouts, packing, transfer."""

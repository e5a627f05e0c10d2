"""What a study may say: schema, file, models, arms, checks across sections, preview of a plan."""

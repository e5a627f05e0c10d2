"""The device that a program is asked to use."""


def require_device(device: str) -> None:
    """ValueError if a GPU is asked for and there is none."""
    import torch  # neither help nor other mistakes wait for it

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: cuda: no CUDA GPU here; --device cpu only rehearses")

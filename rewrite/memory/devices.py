"""Stand-ins."""
import contextlib
def kernels_of(device: str):
    return contextlib.nullcontext()

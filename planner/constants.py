"""Numbers and names that several rooms use, each said once."""

from __future__ import annotations

PPM = 10**6  # shares and relative errors are whole parts per million
MIB, GIB = 2**20, 2**30

CPU = "CPU"  # what ggml calls the host's device

# llama.cpp's own limits, in every build seen.
MAX_LAYERS = 512
MAX_SEQUENCES = 256  # at once
MAX_U32 = 2**32 - 1  # what the widest of the format's usual counts can say
STOCK_DRAFT = 3  # tokens that a server drafts a step unless told (--spec-draft-n-max of b10434)
MAX_ENGINE_DEVICES = 16  # llama_max_devices: entries of the device list, repeats included
CELL_STEP = 256  # contexts and sliding windows are rounded up to this many cells

STRIPE_GRANULE = 2 * MIB  # of device and host memory behind one address range; the driver maps no less
IDLE_THREADS = 4  # of a CPU that computes nothing beside a GPU

OWN_PREFIX = "atsplan."  # of this program's keys in a model file
EXPERTS_KEY = OWN_PREFIX + "experts."  # + layer: original expert ids by position
SIZE_KEY = OWN_PREFIX + "size."  # + tensor name: exact bytes of an opaque tensor

"""Which line of an engine's log explains a failure."""

from __future__ import annotations

import pytest

from runtime.engine.logs import Tail, cause


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "llama_model_load: error loading model: missing tensor 'blk.0.x'\n"
            "llama_model_load_from_file_impl: failed to load model",
            "error loading model: missing tensor 'blk.0.x'",
        ),
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9 MiB on device 0: cudaMalloc failed: "
            "out of memory\nllama_init: failed",
            "allocating 9 MiB on device 0: cudaMalloc failed: out of memory",
        ),
        (
            "loading\n/src/ggml/src/ggml-backend.cpp:99: GGML_ASSERT(buft) failed\n[New LWP 7]",
            "GGML_ASSERT(buft) failed",
        ),
        (
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
            "std::bad_alloc: no memory is left",
        ),
        (
            "/x/ggml-backend.cpp:9: pre-allocated tensor (k) in a buffer (Vulkan0) that cannot run the "
            "operation (NONE)",
            "pre-allocated tensor (k) in a buffer (Vulkan0) that cannot run the operation (NONE): it is "
            "larger than one buffer of the device may be, or of a type the device does not know",
        ),
        (
            "alloc_tensor_range: failed to allocate CUDA_Host buffer of size 9\nllama_model_load: error",
            "failed to allocate CUDA_Host buffer of size 9: host memory for weights is short, not the "
            "device's (--mmap maps the file instead)",
        ),
        (
            "hybrid experts: no device Vulkan7\nerror: invalid device: HYBRID0",
            "hybrid experts: no device Vulkan7",
        ),
        (
            "hybrid experts: note: uploads will be slower\nerror: invalid device: HYBRID0",
            "invalid device: HYBRID0",
        ),
        ("hybrid experts: no slots\na.cpp:7: GGML_ASSERT(x)", "hybrid experts: no slots"),
        ("hybrid experts: no slots" + "\nserved" * 20 + "\na.cpp:7: GGML_ASSERT(x)", "GGML_ASSERT(x)"),
        ("load_tensors: fine\nall well", "all well"),
        ("", ""),
    ],
)
def test_the_telling_line(log: str, line: str) -> None:
    assert cause(log.splitlines()) == line


def test_fragments_become_lines() -> None:
    tail = Tail(2)
    for text in ("one\ntw", "o", "\nthree: err", "or here\n"):
        tail.add(2, text)
    assert list(tail.lines) == ["two", "three: error here"]
    assert tail.cause() == "error here"

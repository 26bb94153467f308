#!/bin/bash
# The native library's unit tests on a CUDA device, under CUDA's compute-sanitizer where that is on PATH:
#
#     bash benchmarks/hybrid/sanitize.sh ENGINE [LIBRARY]
#
# ENGINE: folder of a build of llama.cpp with shared backends; LIBRARY: of the device, libggml-cuda.so when left out.
# Without compute-sanitizer the same tests run without it, and the last line says so.
set -eu
engine=$1 library=${2:-libggml-cuda.so}
here=$(cd "$(dirname "$0")/../.." && pwd)
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
${CXX:-g++} -std=c++17 -O1 -g -pthread -I"$here/runtime/hybrid/native" -I"$here/tests/native" \
    "$here"/runtime/hybrid/native/*.cpp "$here"/tests/native/*.cpp -ldl -o "$made/trial"
export TRIAL_DEVICE_LIBRARY=$library OMP_NUM_THREADS=1
if ! command -v compute-sanitizer >/dev/null; then
    "$made/trial" "$engine" any_layer_on_a_device
    echo "passed, but compute-sanitizer is not on PATH"
    exit 0
fi
# The CUDA backend asks whether a captured graph can be updated and makes a new one when not: no error of memory.
compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$made/trial" "$engine" any_layer_on_a_device
echo "passed under compute-sanitizer"

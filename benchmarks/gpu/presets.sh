#!/bin/bash
# Writes every large preset on a GPU machine, one at a time, and says how long each took:
#
#     PYTHON=python3 bash benchmarks/gpu/presets.sh RESULTS_FOLDER [WORK_FOLDER] [link]
#
# Needs numpy and gguf on PYTHON's path and 20 GB of disk in WORK_FOLDER; no network. With
# `link` the bus is measured too, alone and paced to 25 and 12 GB/s by competing copies.
set -u
out=$1 work=${2:-/tmp/atsplan-models} link=${3:-}
python=${PYTHON:-python3}
mkdir -p "$out" "$work"
log=$out/presets.txt
{
    date -u +%FT%TZ
    nproc
    df -h "$work" | tail -n 1
    "$python" -c "import numpy, gguf; print('numpy', numpy.__version__)"
} >>"$log" 2>&1
for name in olmoe qwen3-30b qwen3.6-35b experts-512 gpt-oss; do
    "$python" -m benchmarks.inputs.write_presets --folder "$work" --delete "$name" 2>&1 | tee -a "$log"
done
"$python" -m benchmarks.inputs.write_presets --folder "$work" strong 2>&1 | tee -a "$log"
"$python" -m benchmarks.inputs.write_presets --reroute "$work/strong.gguf" moderate 2>&1 | tee -a "$log"
"$python" -m benchmarks.inputs.write_presets --reroute "$work/strong.gguf" strong 2>&1 | tee -a "$log"
if [ "$link" = link ]; then
    "$python" -m benchmarks.rounds.link_stream cuda:0 0.5 2>&1 | sed 's/^/link, GB\/s: /' | tee -a "$log"
    for rate in 25 12; do
        "$python" - "$rate" <<'END' 2>&1 | tee -a "$log"
import sys
from benchmarks.rounds.consumer import CompetingStream, conditions

with conditions(8, float(sys.argv[1]), CompetingStream("cuda:0")) as now:
    print(now.said())
END
    done
fi

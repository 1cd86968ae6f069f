#!/usr/bin/env bash
# Real FP8 kernels against the emulation on a Hopper (or newer) GPU, in at most 8 minutes, without a network.
#
#     scripts/gpu_check.sh [--wheels FOLDER] [--dry-run] [options of gpu_check.py]
#
# Needs Python >= 3.11 with a CUDA torch >= 2.11, transformers and accelerate. What else is missing (trl, torchao,
# datasets and what they need) is installed from the wheels in FOLDER into a temporary folder, never into the machine:
#
#     pip download --no-deps --only-binary=:all: -d FOLDER trl==1.16.0 torchao==0.18.0 datasets \
#         pyarrow dill multiprocess xxhash    # the second line where the machine lacks them too
set -euo pipefail
here=$PWD
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
arguments=()
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels)
      wheels=$(cd "$here" && cd "${2:-/no folder named}" 2>/dev/null && pwd) || {
        echo "--wheels ${2:-}: no such folder. Name the folder that holds the wheels." >&2; exit 2; }
      compgen -G "$wheels/*.whl" >/dev/null || {
        echo "--wheels $2: no wheel in it. Fill it as the head of this script says." >&2; exit 2; }
      folder=$(mktemp -d)
      trap 'rm -rf "$folder"' EXIT
      site="$folder/site-packages"  # dill pickles modules from folders of any other name by value, and fails
      "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$wheels"/*.whl
      export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
      shift 2 ;;
    *) arguments+=("$1"); shift ;;
  esac
done
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
"$python" scripts/gpu_check.py ${arguments[@]+"${arguments[@]}"}

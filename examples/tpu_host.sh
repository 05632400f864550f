#!/usr/bin/env bash
# What examples/tpu_pod.sh runs on each host of a TPU slice: bash tpu_host.sh gs://BUCKET/FOLDER
# Change: the names of the store and the run, the recipe.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ ! -e .venv ]]; then  # the image's Python may be older than 3.11
  curl -LsSf https://astral.sh/uv/install.sh | sh
  ~/.local/bin/uv venv --python 3.11
fi
~/.local/bin/uv pip install --quiet -e '.[tpu,remote]'

if pkill -f 'python train.py'; then  # left by a broken connection: it saves and exits
  sleep 60
  pkill -KILL -f 'python train.py' || true
fi
code=0
.venv/bin/python train.py --config=large --workdir="$1/runs/large" \
  --config.data.source="$1/stores/mine" --connect_timeout=600 || code=$?
case $code in
  1 | 2) code=$((code + 100)) ;;  # gcloud uses 1 and 2 too
esac
exit "$code"

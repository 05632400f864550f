#!/usr/bin/env bash
# BERT-base on one machine, with all its GPUs: bash examples/node.sh
# The same command resumes. Change: the text, the folders of the store and the run, the recipe.
set -euo pipefail
cd "$(dirname "$0")/.."

pip install -e '.[cuda]'
bert-jax prepare 'text/*.txt' stores/mine --tokenizer=wordpiece --vocab-size=30522
python train.py --config=base --workdir=runs/base --config.data.source=stores/mine

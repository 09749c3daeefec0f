"""Makes a Hugging Face folder, config.json and model.safetensors, of a checkpoint of `gpt2_train.py`.

    python examples/sambaflow/gpt2_convert.py gpt2.pt gpt2_hf

It needs PyTorch and safetensors alone.
"""

import sys
from pathlib import Path

import torch
from gpt2_model import save_pretrained

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: gpt2_convert.py CHECKPOINT.pt FOLDER")
    checkpoint, folder = map(Path, sys.argv[1:])
    save_pretrained(torch.load(checkpoint)["model"], folder)
    print(f"converted: {folder}")

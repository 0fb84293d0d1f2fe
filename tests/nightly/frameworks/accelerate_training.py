"""accelerate, as its examples have it: rank 0 prepares the data first, trains, evaluates and saves alone."""

import os
import tempfile
import time

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pause_s = float(os.environ["PAUSE_S"])
accelerator = Accelerator(cpu=True)
with accelerator.main_process_first():
    if accelerator.is_main_process:
        time.sleep(pause_s)  # datasets.map
model = nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.ones(32, 4), torch.ones(32, 1)), batch_size=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, wanted in loader:
    loss = nn.functional.mse_loss(model(inputs), wanted)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    time.sleep(pause_s)  # evaluates
accelerator.wait_for_everyone()
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_model(model, folder)
accelerator.wait_for_everyone()
print(f"rank {accelerator.process_index}: done", flush=True)
accelerator.end_training()

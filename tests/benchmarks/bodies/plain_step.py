"""What a plain PyTorch script does to come through its first training step: import, model, optimizer, one step."""

import torch
from torch import nn

model = nn.Linear(784, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
image, label = torch.randn(32, 784), torch.randint(10, (32,))
optimizer.zero_grad()
torch.autograd.backward(nn.functional.cross_entropy(model(image), label))
optimizer.step()

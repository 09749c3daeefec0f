"""Updates of a user's own that cannot be those of an optimizer, as users write them: without types."""

# mypy: allow-untyped-defs, allow-untyped-calls

import itertools
import math

import torch

COUNTED = itertools.count(1)


# fmt: off
def branches(p, g, *, lr=1e-3): p.add_(g) if lr > 0 else None
def roots(p, g, *, lr=1e-3): p.add_(g, alpha=math.sqrt(lr))
def norms(p, g, *, lr=1e-3): p.add_(g / g.norm(), alpha=-lr)
def items(p, g, *, lr=1e-3): p.add_(g.max().item())
def views(p, g, *, lr=1e-3): p.add_(g.view(8, 8).t().reshape(-1))
def draws(p, g, *, lr=1e-3): p.add_(torch.randn_like(g), alpha=lr)
def returns(p, g, *, lr=1e-3): return p - lr * g
def alphas(p, g, *, lr=1e-3): p.sub_(g, alpha=lr)
def chooses(p, g, *, step, lr=1e-3): p.sub_(g * torch.where(step < 9, lr * 0.1, lr))
def asks(p, g, *, step, lr=1e-3): p.add_(g, alpha=-torch.sym_ite(step < 9, lr * 0.1, lr))
def betas(p, g, *, lr=1e-3, betas=(0.9, 0.99)): p.sub_(g)
def sizes(p, g, *, lr=1e-3): p.add_(g / p.numel() ** 0.5)
def matrices(p, g, *, lr=1e-3): p.add_(g * 2 if p.ndim > 1 else g)
def calls(p, g, *, lr=1e-3): p.add_(g / next(COUNTED))
def no_rate(p, g, *, beta=0.9): p.sub_(g)
def no_default(p, g, *, lr): p.sub_(g, alpha=lr)
def switch(p, g, *, lr=1e-3, nesterov=False): p.sub_(g, alpha=lr)
def masters(p, g, master, *, lr=1e-3): p.sub_(g, alpha=lr)
def others(p, g, *states, lr=1e-3): p.sub_(g, alpha=lr)
# fmt: on

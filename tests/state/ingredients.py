"""Ingredients of generated nets, as source text. `@` is a number of the ingredient's own, K the first call in which a
counter has an effect. Each changes `h`, float32 [batch, 6], or state beside it.

`sound`: a capture can hold it, and must be equal to eager PyTorch. The others may be refused.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ingredient:
    name: str
    forward: str = ""
    init: str = ""
    top: str = ""
    is_sound: bool = False


COUNTERS: tuple[tuple[str, str, str, str, str], ...] = (
    # name, top, init, what counts in forward(), and the number of calls so far
    ("attribute", "", "self.n@ = 0", "self.n@ += 1", "self.n@"),
    ("namespace", "", "self.s@ = SimpleNamespace(n=0)", "self.s@.n += 1", "self.s@.n"),
    ("dataclass", "@dataclass\nclass Count@:\n    n: int = 0", "self.c@ = Count@()", "self.c@.n += 1", "self.c@.n"),
    (
        "slots",
        'class Slots@:\n    __slots__ = ("__n",)\n\n    def __init__(self):\n        self.__n = 0\n\n'
        "    def count(self):\n        self.__n += 1\n        return self.__n",
        "self.slots@ = Slots@()",
        "n@ = self.slots@.count()",
        "n@",
    ),
    ("list", "", "self.l@ = []", "self.l@.append(1)", "len(self.l@)"),
    ("deque", "", "self.q@ = deque(maxlen=2000)", "self.q@.append(0)", "len(self.q@)"),
    ("dict", "", 'self.d@ = {"n": 0}', 'self.d@["n"] += 1', 'self.d@["n"]'),
    ("set", "", "self.set@ = set()", "self.set@.add(len(self.set@))", "len(self.set@)"),
    ("Counter", "", "self.counts@ = Counter()", 'self.counts@["n"] += 1', 'self.counts@["n"]'),
    ("class attribute", "class Shared@:\n    n = 0", "", "Shared@.n += 1", "Shared@.n"),
    ("global", "CALLS@ = 0", "", "global CALLS@\nCALLS@ += 1", "CALLS@"),
    ("dict in a global", 'STATS@ = {"n": 0}', "", 'STATS@["n"] += 1', 'STATS@["n"]'),
    (
        "function attribute",
        "def count@():\n    count@.n += 1\n    return count@.n\n\n\ncount@.n = 0",
        "",
        "n@ = count@()",
        "n@",
    ),
    ("default argument", "def count@(n=[0]):\n    n[0] += 1\n    return n[0]", "", "n@ = count@()", "n@"),
    (
        "closure",
        "def make@():\n    n = 0\n\n    def count():\n        nonlocal n\n        n += 1\n        return n\n"
        "\n    return count",
        "self.count@ = make@()",
        "n@ = self.count@()",
        "n@",
    ),
    (
        "generator",
        "def numbers@():\n    n = 0\n    while True:\n        n += 1\n        yield n",
        "self.numbers@ = numbers@()",
        "n@ = next(self.numbers@)",
        "n@",
    ),
    ("itertools.count", "", "self.numbers@ = itertools.count(1)", "n@ = next(self.numbers@)", "n@"),
    ("itertools.cycle", "", "self.cycle@ = itertools.cycle(range(1, 2000))", "n@ = next(self.cycle@)", "n@"),
    ("ContextVar", 'VAR@ = ContextVar("VAR@", default=0)', "", "VAR@.set(VAR@.get() + 1)", "VAR@.get()"),
    ("threading.local", "LOCAL@ = threading.local()\nLOCAL@.n = 0", "", "LOCAL@.n += 1", "LOCAL@.n"),
    ("numpy array", "", "self.a@ = np.zeros(1, dtype=int)", "self.a@ += 1", "int(self.a@[0])"),
)


def counter(row: tuple[str, str, str, str, str], first: int | None) -> Ingredient:
    """A counter whose effect is from call `first` on, counted from 1; None: nobody reads it. Nothing can set the locals
    of a generator, to see whether anybody does: such a counter may be refused."""
    name, top, init, counts, read = row
    effect = "" if first is None else f"\nh = h * (1.0 if {read} < {first} else 0.5)"
    label = f"{name} that nobody reads" if first is None else f"{name} with an effect from call {first} on"
    return Ingredient(label, counts + effect, init, top, is_sound=first is None and name != "generator")


def _sound(name: str, forward: str, init: str = "", top: str = "") -> Ingredient:
    return Ingredient(name, forward, init, top, is_sound=True)


IN_A_BUFFER = _sound(
    "steps in a buffer",
    "self.steps@.add_(1)\nh = h * torch.where(self.steps@ < K, 1.0, 0.5)",
    'self.register_buffer("steps@", torch.zeros(()))',
)
"""The remedy of a counter."""

SOUND: tuple[Ingredient, ...] = (
    _sound("dropout", "h = self.drop@(h)", "self.drop@ = nn.Dropout(0.2)"),
    _sound("BatchNorm", "h = self.norm@(h)", "self.norm@ = nn.BatchNorm1d(6)"),
    _sound("LayerNorm", "h = self.norm@(h)", "self.norm@ = nn.LayerNorm(6)"),
    _sound("embedding", "h = h + self.table@((h[:, 0] > 0).long())", "self.table@ = nn.Embedding(2, 6)"),
    _sound("LSTM", "h = h + self.lstm@(h.unsqueeze(1))[0].squeeze(1)", "self.lstm@ = nn.LSTM(6, 6, batch_first=True)"),
    _sound("attention", "h = h + self.att@(h, h, h)[0]", "self.att@ = nn.MultiheadAttention(6, 2)"),
    _sound(
        "table in a dict",
        "if h.shape[1] not in self.tables@:\n    self.tables@[h.shape[1]] = torch.arange(h.shape[1]) / 10\n"
        "h = h + self.tables@[h.shape[1]]",
        "self.tables@ = {}",
    ),
    _sound(
        "table in a global",
        'if "t" not in TABLE@:\n    TABLE@["t"] = torch.linspace(0, 1, 6)\nh = h + TABLE@["t"]',
        top="TABLE@ = {}",
    ),
    _sound(
        "grid in an attribute",
        "if self.grid@ is None:\n    self.grid@ = torch.linspace(-1, 1, 6).cos()\nh = h * self.grid@",
        "self.grid@ = None",
    ),
    _sound(
        "lru_cache of a table",
        "h = h + table@(6)",
        top="@functools.lru_cache\ndef table@(size):\n    return torch.sin(torch.arange(size) / size)",
    ),
    _sound(
        "cached_property of a table",
        "h = h + self.lazy@.table",
        "self.lazy@ = Lazy@()",
        "class Lazy@:\n    @functools.cached_property\n    def table(self):\n        return torch.arange(6) / 7",
    ),
    _sound(
        "buffer registered in forward",
        'if not hasattr(self, "made@"):\n'
        '    self.register_buffer("made@", torch.ones(6) / 3, persistent=False)\nh = h + self.made@',
    ),
    _sound(
        "config found in the first call",
        'self.config@.setdefault("width", h.shape[1])\nh = h / self.config@["width"]',
        "self.config@ = {}",
    ),
    _sound(
        "moving mean in a buffer",
        "self.mean@.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)\nh = h - self.mean@",
        'self.register_buffer("mean@", torch.zeros(6))',
    ),
    _sound(
        "non-persistent buffer changed in place",
        "self.last@.copy_(h.detach().mean(0))\nh = h + self.last@",
        'self.register_buffer("last@", torch.zeros(6), persistent=False)',
    ),
    _sound(
        "first scale by a flag in a buffer",
        "self.scale@.copy_(torch.where(self.seen@, self.scale@, h.detach().abs().max()))\nself.seen@.fill_(True)\n"
        "h = h / self.scale@",
        'self.register_buffer("scale@", torch.ones(()))\nself.register_buffer("seen@", torch.zeros(()).bool())',
    ),
    IN_A_BUFFER,
    _sound("noise of torch", "if self.training:\n    h = h + 0.1 * torch.randn_like(h)"),
    _sound("bernoulli of torch", "if self.training:\n    h = h * torch.bernoulli(torch.full((6,), 0.8))"),
    _sound(
        "forward hook",
        "h = self.inner@(h)",
        "self.inner@ = nn.Linear(6, 6)\nself.inner@.register_forward_hook(lambda module, given, result: result * 0.5)",
    ),
    _sound(
        "forward pre-hook",
        "h = self.inner@(h)",
        "self.inner@ = nn.Linear(6, 6)\n"
        "self.inner@.register_forward_pre_hook(lambda module, given: (given[0].tanh(),))",
    ),
    _sound("weight_norm", "h = self.wn@(h)", "self.wn@ = parametrizations.weight_norm(nn.Linear(6, 6))"),
    _sound("spectral_norm", "h = self.sn@(h)", "self.sn@ = parametrizations.spectral_norm(nn.Linear(6, 6))"),
    _sound("checkpoint", "h = checkpoint(self.inner@, h, use_reentrant=False)", "self.inner@ = nn.Linear(6, 6)"),
    _sound("checkpoint_wrapper", "h = self.inner@(h)", "self.inner@ = checkpoint_wrapper(nn.Linear(6, 6))"),
    _sound(
        "tied weights",
        "h = self.d@(torch.tanh(self.c@(h)))",
        "self.c@ = nn.Linear(6, 6)\nself.d@ = nn.Linear(6, 6)\nself.d@.weight = self.c@.weight",
    ),
    _sound("data of a weight that is read", "h = h + self.first.weight.data.mean()"),
    _sound("data of an activation that is read", "h = h - h.data.mean(0)"),
    _sound("activations kept in a list", "self.kept@.append(h)", "self.kept@ = []"),
    _sound("a log", 'self.log@.append(f"{len(self.log@)}: {tuple(h.shape)}")', "self.log@ = []"),
    _sound("last activation in an attribute", "self.last@ = h.detach()", "self.last@ = None"),
    _sound(
        "layers in a loop",
        "for layer in self.layers@:\n    h = h + layer(h)",
        "self.layers@ = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))",
    ),
)

OTHERS: tuple[Ingredient, ...] = (
    Ingredient(
        "scale in a list",
        "if not self.l@:\n    self.l@.append(h.detach().abs().max())\nh = h / self.l@[0]",
        "self.l@ = []",
    ),
    Ingredient("scale by hasattr", 'if not hasattr(self, "s@"):\n    self.s@ = h.detach().std() + 1\nh = h / self.s@'),
    Ingredient(
        "mask kept", "if self.m@ is None:\n    self.m@ = torch.rand(6) > 0.5\nh = h * self.m@", "self.m@ = None"
    ),
    Ingredient(
        "cached_property of weights",
        "h = h / self.lazy@.norm",
        "self.lazy@ = Lazy@()",
        "class Lazy@(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(6, 6)\n\n"
        "    @functools.cached_property\n    def norm(self):\n        return self.layer.weight.detach().norm()",
    ),
    _sound(
        "buffer replaced by data",
        "self.last@.data = h.detach().mean(0)",
        'self.register_buffer("last@", torch.zeros(6))',
    ),
    Ingredient(
        "buffer replaced and read",
        "h = h + self.last@\nself.last@ = h.detach().mean(0)",
        'self.register_buffer("last@", torch.zeros(6))',
    ),
    Ingredient("draw of Python", "h = h * random.random()"),
    Ingredient("draw of NumPy", "h = h + float(np.random.rand())"),
    Ingredient("NumPy generator", "h = h * float(self.rng@.random())", "self.rng@ = np.random.default_rng(0)"),
    Ingredient("tensor hook", "if h.requires_grad:\n    h.register_hook(lambda gradient: gradient * 0.5)"),
    Ingredient(
        "hook that counts",
        "h = self.inner@(h)",
        "self.inner@ = nn.Linear(6, 6)\nself.seen@ = []\nself.inner@.register_forward_hook(partial(hook@, self.seen@))",
        "def hook@(seen, module, given, result):\n    seen.append(len(seen))\n"
        "    return result * (1.0 if len(seen) < 8 else 0.5)",
    ),
    Ingredient("data changed in place", "v@ = h * 1\nv@.data.mul_(2)\nh = v@"),
    Ingredient("weights clamped by data", "self.first.weight.data.clamp_(-0.5, 0.5)"),
    Ingredient("layer skipped by a draw", "if random.random() < 0.5:\n    h = h + 1"),
    Ingredient(
        "default dtype",
        "torch.set_default_dtype(torch.float64)\nc@ = torch.full((6,), 1e-3) + 1e7\n"
        "torch.set_default_dtype(torch.float32)\nh = h + (c@ - 1e7).float()",
    ),
    Ingredient(
        "gradients turned off",
        "torch.set_grad_enabled(False)\ns@ = h.abs().max()\ntorch.set_grad_enabled(True)\nh = h / s@",
    ),
)

LOSSES: tuple[Ingredient, ...] = (
    # `forward`: what ends forward(), of `out` and `y`; without y, the loss is the function or module `init`
    _sound("returned", "return functional.mse_loss(out, y)"),
    _sound("in a dict", 'return {"out": out, "loss": functional.mse_loss(out, y)}'),
    _sound("in a tuple", "return functional.mse_loss(out, y), out"),
    _sound(
        "in a dataclass",
        "return Result(h.square().mean(), functional.mse_loss(out, y))",
        top="@dataclass\nclass Result:\n    kl: object\n    loss: object",
    ),
    _sound(
        "in a named tuple",
        "return Result(h.square().mean(), functional.mse_loss(out, y))",
        top='Result = namedtuple("Result", ["kl", "loss"])',
    ),
    _sound("named", "return out", '"mse"'),
    _sound("module", "return out", "nn.MSELoss()"),
    _sound("function of torch", "return out", "functional.smooth_l1_loss"),
    _sound("function", "return out", "own", "def own(out, y):\n    return (out - y).abs().clamp(min=0.1).mean()"),
    _sound(
        "module of its own",
        "return out",
        "Own()",
        "class Own(nn.Module):\n    def forward(self, out, y):\n        return (out - y).square().mean() * 3",
    ),
    Ingredient(
        "module with a hook",
        "return out",
        "hooked()",
        "def hooked():\n    loss = nn.MSELoss()\n"
        "    loss.register_forward_hook(lambda module, given, result: result * 3)\n    return loss",
    ),
    Ingredient(
        "module with a buffer",
        "return out",
        "Moving()",
        "class Moving(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        '        self.register_buffer("mean", torch.zeros(()))\n\n'
        "    def forward(self, out, y):\n        self.mean.mul_(0.9).add_(out.detach().mean(), alpha=0.1)\n"
        "        return functional.mse_loss(out - self.mean, y)",
    ),
    Ingredient("two in a tuple", "return functional.mse_loss(out, y), h.square().mean()"),
)

OPTIMIZERS: tuple[Ingredient, ...] = (
    # `init`: of `parameters`; `forward`: statements about `optimizer`, and `scheduler`
    _sound("SGD", "", "torch.optim.SGD(parameters, lr=0.05)"),
    _sound("SGD with weight decay", "", "torch.optim.SGD(parameters, lr=0.05, weight_decay=0.01)"),
    _sound("momentum", "", "torch.optim.SGD(parameters, lr=0.02, momentum=0.9)"),
    _sound("AdamW", "", "torch.optim.AdamW(parameters, lr=0.01)"),
    Ingredient(
        "subclass",
        "",
        "AdamW(parameters, lr=0.01)",
        "class AdamW(torch.optim.AdamW):\n    @torch.no_grad()\n    def step(self, closure=None):\n"
        "        for group in self.param_groups:\n            for one in group['params']:\n"
        "                if one.grad is not None:\n                    one.sub_(one.grad.sign(), alpha=0.01)",
    ),
    Ingredient(
        "hook",
        "optimizer.register_step_pre_hook(halve)",
        "torch.optim.SGD(parameters, lr=0.05)",
        "def halve(optimizer, *others):\n    for group in optimizer.param_groups:\n"
        "        for one in group['params']:\n"
        "            if one.grad is not None:\n                one.grad.mul_(0.5)",
    ),
    Ingredient(
        "scheduler",
        "scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)",
        "torch.optim.SGD(parameters, lr=0.05)",
    ),
)

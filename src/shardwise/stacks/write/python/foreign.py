"""Models that other code builds: transformers, or the user's factory."""

from __future__ import annotations

from shardwise.spec.families import BLOCKS
from shardwise.spec.huggingface import to_config
from shardwise.spec.lookup import ModuleRef, config_folder
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.python import axes
from shardwise.stacks.write.python.piece import Piece, lines
from shardwise.stacks.write.python.settings import data_of, torch_dtype, train_of


def blocks_of(run: RunSpec) -> str:
    """The expression for the list of repeated blocks of `model`."""
    if not isinstance(run.model, ModelSpec):
        return "find_blocks(model)"
    return f"list(model.{BLOCKS[run.model.family].path})"


def fills(run: RunSpec) -> bool:
    """Whether the script initialises weights module by module on the meta device."""
    return train_of(run).meta_init and not getattr(run.model, "pretrained", False)


def foreign_settings(run: RunSpec) -> dict[str, object]:
    model = run.model
    if isinstance(model, ModuleRef):
        return {}
    vocab = {}
    if isinstance(model, ModelSpec) and data_of(run).synthetic:
        vocab["VOCAB"] = model.vocab
    if isinstance(model, ModelSpec) and model.config is None:
        return {**vocab, "CONFIG": to_config(model)}
    return {**vocab, "CONFIG": str(config_folder(str(model.config)))}


def foreign_pieces(run: RunSpec) -> list[Piece]:
    found = [_build(run)]
    if fills(run):
        found.append(_initializer(run))
    if not isinstance(run.model, ModelSpec):
        found.append(Piece(FIND_BLOCKS, ("torch:nn",)))
    return found


def _build(run: RunSpec) -> Piece:
    model = run.model
    if isinstance(model, ModuleRef):
        module, _, function = model.factory.partition(":")
        code = f"def build() -> nn.Module:\n    return own_model.{function}().train()"
        return Piece(code, ("torch:nn", f"{module} as own_model"))
    # One that is divided attends by a function of the script.
    attention = axes.ATTENTION if axes.has_axes(run) else "sdpa"
    settings = f'attn_implementation="{attention}", dtype=torch.float32'
    pretrained = model.pretrained
    read = "for_model(**CONFIG)" if model.config is None else "from_pretrained(CONFIG)"
    start = "from_pretrained(\n        CONFIG" if pretrained else "from_config(\n        config"
    code = lines(
        "def build() -> nn.Module:",
        not pretrained and f"    config = AutoConfig.{read}",
        f"    model = AutoModelForCausalLM.{start}, {settings}",
        "    )",
        "    model.config.use_cache = False",
        "    return model.train()",
    )
    used = ("torch", "torch:nn", "transformers:AutoModelForCausalLM")
    return Piece(code, used if pretrained else (*used, "transformers:AutoConfig"))


def _initializer(run: RunSpec) -> Piece:
    factory = isinstance(run.model, ModuleRef)
    dtype = torch_dtype(run.strategy.master_dtype)
    code = lines(
        '''
class Initializer:
    """Allocates and initialises the tensors of a model on the meta device, unit by unit.

    Each module has a seed from its name, so every rank draws the same numbers, and none ever
    holds more than one unsharded unit.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.names = {module: name for name, module in model.named_modules()}
        # Tied parameters stay one.
        self.made: dict[torch.Tensor, torch.Tensor] = {}

    def __call__(self, unit: nn.Module) -> None:
        fresh = {module for module in unit.modules() if self.make(module)}
        for module in reversed(list(unit.modules())):
            if fresh & {module, *module.children()}:
                seed = sha256(f"{SEED}/{self.names[module]}".encode()).digest()
                torch.manual_seed(int.from_bytes(seed[:8], "little") >> 1)
                with torch.no_grad():
                    self.fill(module)
        # Later random numbers, such as dropout, use the run's own seed.
        torch.manual_seed(SEED)
''',
        f"""

    def make(self, module: nn.Module) -> bool:
        made = False
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in self.made:
                    real = torch.empty_like(tensor, device=self.device)
                    if isinstance(tensor, nn.Parameter):
                        real = nn.Parameter(real.to({dtype}), tensor.requires_grad)
                    self.made[tensor] = real
                table[key] = self.made[tensor]
                made = True
        return made
""",
        FILL_FACTORY if factory else FILL_TRANSFORMERS,
    )
    return Piece(code, ("hashlib:sha256", "torch", "torch:nn"))


FILL_TRANSFORMERS = """

    def fill(self, module: nn.Module) -> None:
        self.model._init_weights(module)
"""

FILL_FACTORY = """

    def fill(self, module: nn.Module) -> None:
        if hasattr(self.model, "_init_weights") and hasattr(self.model, "config"):
            self.model._init_weights(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
        elif hasattr(module, "_reset_parameters"):
            module._reset_parameters()
"""

FIND_BLOCKS = '''
def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: lists of modules of the class with the most parameters."""
    outer: list[str] = []
    blocks: dict[type, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        inside = any(name.startswith(f"{other}.") for other in outer)
        alike = len({type(member) for member in module}) == 1
        if alike and all(map(size, module)) and not inside:
            outer.append(name)
            blocks.setdefault(type(module[0]), []).extend(module)
    return max(blocks.values(), key=lambda found: sum(map(size, found)))
'''

VOCABULARY = '''
def vocabulary(model: nn.Module) -> int:
    """The size of the model's vocabulary."""
    config = getattr(model, "config", None)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return getattr(config, "vocab_size", None) or tables[0].num_embeddings
'''

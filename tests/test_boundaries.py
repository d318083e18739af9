"""Rules about the source: devices and private names of torch in one place, no import cycles."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
FILES = sorted((SOURCE / "shardwise").rglob("*.py"))


@cache
def trees() -> dict[str, ast.Module]:
    """The parsed files by their paths; only who runs these tests parses them."""
    here = SOURCE / "shardwise"
    return {str(file.relative_to(here)): ast.parse(file.read_text()) for file in FILES}


# ---- devices -------------------------------------------------------------------------------------

DEVICE = re.compile(r"(?<![a-z])(cuda|nccl|gloo|xpu|xccl|npu|hccl)", re.IGNORECASE)
# Files and folders that name devices and backends, and why.
MAY_NAME_DEVICES = {
    "engine/": "applies strategies to devices",
    "pytorch/": "device.py holds what differs between devices",
    "observe/": "reads traces and memory snapshots of GPUs, on machines without one",
    "stacks/": "reads and writes the files of other stacks, which name devices",
    "spec/train.py": "the values of train.device in run.toml",
    "launch/worker.py": "a variable that must be set before torch is imported",
    "report/memory.py": "advice about memory snapshots: a setting of the CUDA allocator",
}


def words_in_code(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Identifiers and string constants; neither docstrings nor help texts of commands."""
    skipped = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) or (isinstance(node, ast.keyword) and node.arg == "help")
        for part in ast.walk(node.value)
        if isinstance(part, ast.Constant) and (not isinstance(node, ast.Expr) or part is node.value)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        # Every node keeps its identifiers and constants in fields that are strings.
        for _, value in ast.iter_fields(node):
            for word in value if isinstance(value, list) else [value]:
                if isinstance(word, str):
                    yield getattr(node, "lineno", 0), word


def test_the_words_are_identifiers_and_strings() -> None:
    source = '"""cuda"""\nimport a.nccl as b\nc.xpu(gloo, help="hccl")\nd = f"{c}:npu"  # cuda'
    found = {word for _, word in words_in_code(ast.parse(source)) if DEVICE.search(word)}
    assert found == {"a.nccl", "xpu", "gloo", ":npu"}


def test_only_the_engine_names_devices_and_backends() -> None:
    found = {
        f"{file}:{line} {word}"
        for file, tree in trees().items()
        if not file.startswith(tuple(MAY_NAME_DEVICES))
        for line, word in words_in_code(tree)
        if DEVICE.search(word)
    }
    assert not found, "use shardwise.pytorch.device, or say why not in MAY_NAME_DEVICES"


@pytest.mark.parametrize("allowed", list(MAY_NAME_DEVICES))
def test_every_exception_is_needed(allowed: str) -> None:
    allowing = [tree for file, tree in trees().items() if file.startswith(allowed)]
    assert any(DEVICE.search(word) for tree in allowing for _, word in words_in_code(tree))


# ---- private names of torch ----------------------------------------------------------------------

PRIVATE_NAMES = "pytorch/private.py"
# Private by their name, but not of torch.
NOT_OF_TORCH = {
    "_replace", "_asdict", "_make", "_fields",  # documented methods of named tuples
    "_exit",  # os
    "_init_weights", "_attn_implementation", "_apply_gate",  # transformers
}  # fmt: skip


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NOT_OF_TORCH


def own_names(tree: ast.AST) -> set[str]:
    """Functions, classes and attributes that a file defines itself."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                names.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def private_imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "torch" and any(map(is_private, rest)):
                yield name


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """Private attributes of objects that the file does not define, read or by `getattr`."""
    own = own_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name) if name not in own:
                pass
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr" | "setattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ):
                pass
            case _:
                continue
        if is_private(name):
            yield ast.unparse(node)


def inherited_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a subclass of a class of torch shares with it."""
    origin = {
        one.asname or one.name: (node.module, one.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for one in node.names
        if node.module.startswith(("torch", "shardwise.pytorch"))
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        used = {n.name for n in node.body if isinstance(n, ast.FunctionDef)} | {
            n.attr
            for n in ast.walk(node)
            if isinstance(n, ast.Attribute)
            and isinstance(n.value, ast.Name)
            and n.value.id == "self"
        }
        for base in node.bases:
            if not isinstance(base, ast.Name) or base.id not in origin:
                continue
            module, name = origin[base.id]
            parents = inspect.getmro(getattr(importlib.import_module(module), name))[:-1]
            text = "".join(
                inspect.getsource(p) for p in parents if p.__module__.startswith("torch")
            )
            for one in filter(is_private, used):
                if re.search(rf"\b{one}\b", text):
                    yield f"{node.name}.{one}"


def test_private_names_of_torch_are_in_one_file() -> None:
    found = [
        f"{file}: {name}"
        for file, tree in trees().items()
        if file != PRIVATE_NAMES
        for names in (private_imports, private_attributes, inherited_names)
        for name in names(tree)
    ]
    assert not found, f"move these to {PRIVATE_NAMES}, with their reason"


def test_private_names_are_detected() -> None:
    source = """
import torch._dynamo
from torch.utils._pytree import tree_leaves
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import Module
torch.ops._c10d_functional, getattr(x, "_local_tensor"), x._replace, x.__name__
class Own(Module):
    def one(self):
        self._mine, self._parameters = 1, {}
"""
    tree = ast.parse(source)
    assert len(list(private_imports(tree))) == 3
    assert list(private_attributes(tree)) == [
        "torch.ops._c10d_functional",
        "getattr(x, '_local_tensor')",
    ]
    assert list(inherited_names(tree)) == ["Own._parameters"]


# ---- bytes of other processes --------------------------------------------------------------------

# Modules whose data runs code when it is read, and functions that unpickle what they receive.
UNPICKLE_MODULES = {
    "pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib",
    "multiprocessing.connection", "multiprocessing.managers",
    "torch.distributed.rpc",
}  # fmt: skip
UNPICKLE_FUNCTIONS = {
    "broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list",
    "send_object_list", "recv_object_list",
    "PGTransport",
}  # fmt: skip


# Functions that unpickle unless they are called with the one argument that forbids it, or do if
# they are called with the one that allows it. Passed on, they may be called with any.
LOADERS = {"torch.load": "weights_only", "torch.serialization.load": "weights_only",
           "numpy.load": "allow_pickle"}  # fmt: skip


def imported_names(tree: ast.AST) -> dict[str, str]:
    """The full name of each name that an import of the file binds."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=found):
                names |= {one.asname: one.name for one in found if one.asname}
            case ast.ImportFrom(module=str(module), names=found):
                names |= {one.asname or one.name: f"{module}.{one.name}" for one in found}
    return names


def full_name(node: ast.expr, names: dict[str, str]) -> str:
    """What `a.b.c` stands for, given the imports of its file; nothing for other expressions."""
    match node:
        case ast.Name(id=name):
            return names.get(name, name)
        case ast.Attribute(value=inner, attr=name) if owner := full_name(inner, names):
            return f"{owner}.{name}"
    return ""


def is_safe(call: ast.Call, setting: str) -> bool:
    """Whether this call of one of LOADERS unpickles nothing."""
    given = {one.arg: ast.unparse(one.value) for one in call.keywords}
    safe = {"weights_only": ("True",), "allow_pickle": ("False", "")}[setting]
    return None not in given and given.get(setting, "") in safe


def unpicklers(tree: ast.AST) -> Iterator[str]:
    """Imports, names and calls by which bytes from elsewhere could run code."""
    names = imported_names(tree)
    safe = {
        id(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        if (setting := LOADERS.get(full_name(node.func, names))) and is_safe(node, setting)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=found):
                yield from (one.name for one in found if one.name in UNPICKLE_MODULES)
            case ast.ImportFrom(module=str(module), names=found):
                inner = {f"{module}.{one.name}" for one in found}
                yield from UNPICKLE_MODULES & {module, *inner}
                yield from (one.name for one in found if one.name in UNPICKLE_FUNCTIONS)
            case ast.Attribute(attr=attribute):
                full = full_name(node, names)
                if full in UNPICKLE_MODULES or attribute in UNPICKLE_FUNCTIONS:
                    yield ast.unparse(node)
                if full in LOADERS and id(node) not in safe:
                    yield full
            case ast.Name() if id(node) not in safe:
                full = full_name(node, names)
                yield from {full} & LOADERS.keys()


def test_nothing_unpickles_the_bytes_of_others() -> None:
    """`RankTree.json_of` carries values between ranks, `safe_pickle` reads files of others."""
    found = [f"{file}: {name}" for file, tree in trees().items() for name in unpicklers(tree)]
    assert found == ["observe/safe_pickle.py: pickle"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from multiprocessing import connection", ["multiprocessing.connection"]),
        ("multiprocessing.connection.Client(x)", ["multiprocessing.connection"]),
        ("from torch.distributed import gather_object", ["gather_object"]),
        ("dist.broadcast_object_list(values)", ["dist.broadcast_object_list"]),
        ("torch.distributed.gather_object(x)", ["torch.distributed.gather_object"]),
        ("torch.load(file)", ["torch.load"]),
        ("torch.load(file, weights_only=False)", ["torch.load"]),
        ("torch.load(file, weights_only=True, **more)", ["torch.load"]),
        ("torch.load(file, weights_only=True)", []),
        ("torch.serialization.load(file)", ["torch.serialization.load"]),
        ("from torch import load\nload(file)", ["torch.load"]),
        ("from torch import load as read\nread(file, weights_only=True)", []),
        ("import torch as t\nt.load(file)", ["torch.load"]),
        ("f = torch.load", ["torch.load"]),
        ("partial(torch.load, weights_only=True)", ["torch.load"]),
        ("import numpy as np\nnp.load(file, allow_pickle=True)", ["numpy.load"]),
        ("import numpy as np\nnp.load(file, allow_pickle=False)\nnp.load(file)", []),
        ("from numpy import load\nf = load", ["numpy.load"]),
        ("json.load(file)", []),
    ],
)
def test_unpicklers_are_detected(source: str, found: list[str]) -> None:
    assert list(unpicklers(ast.parse(source))) == found


# ---- imports -------------------------------------------------------------------------------------


def module_name(file: str) -> str:
    return ".".join(("shardwise", *Path(file).with_suffix("").parts)).removesuffix(".__init__")


@cache
def modules() -> dict[str, ast.Module]:
    return {module_name(file): tree for file, tree in trees().items()}


def imports_of(node: ast.AST) -> Iterator[str]:
    """Modules of Shardwise that are imported, in functions too; not those for type checkers."""
    for part in ast.iter_child_nodes(node):
        match part:
            case ast.ImportFrom(module=str(name), names=parts) if name in modules():
                inner = (f"{name}.{one.name}" for one in parts)
                yield from (one if one in modules() else name for one in inner)
            case ast.Import(names=parts):
                yield from (one.name for one in parts if one.name in modules())
            case ast.If(test=test, orelse=other) if "TYPE_CHECKING" in ast.unparse(test):
                yield from imports_of(ast.Module(other, []))
            case _:
                yield from imports_of(part)


@cache
def imports() -> dict[str, set[str]]:
    return {module: set(imports_of(tree)) for module, tree in modules().items()}


def test_imports_have_no_cycle() -> None:
    try:
        TopologicalSorter(imports()).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize("module", ["device", "private"])
def test_what_every_layer_may_use_imports_nothing_of_shardwise(module: str) -> None:
    assert not imports()[f"shardwise.pytorch.{module}"]


# ---- functions -----------------------------------------------------------------------------------

LONGEST = 60


def test_functions_are_short() -> None:
    long = {
        f"{file} {node.name}"
        for file, tree in trees().items()
        if file.startswith(("predict/", "planning/", "engine/"))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno
        if node.end_lineno - node.lineno + 1 >= LONGEST
    }
    assert not long


# ---- our own words -------------------------------------------------------------------------------

# Rooms in which no code reads what other code has worded: what it needs is data.
SPEAKS = ("planning/", "observe/", "report/", "step/", "web/", "cli/")
# Functions and methods that word something, and attributes that hold words.
WORDED = re.compile(r"(.*_)?words|show_\w+|brief|evidence|fix|title|in_words|problems|refused")
TAKES_APART = re.compile(
    r"startswith|endswith|removeprefix|removesuffix|replace|r?partition|r?split|r?find|r?index|"
    r"(re|_\w+|[A-Z]\w+)\.(sub|match|search|fullmatch|findall|split)"
)


def is_worded(node: ast.expr, words: set[str]) -> bool:
    """Whether an expression is our own words: made here, or kept in one of the names `words`."""
    match node:
        case ast.Name(id=name):
            return name in words
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return WORDED.fullmatch(name) is not None
        case ast.Attribute(attr=name):
            return WORDED.fullmatch(name) is not None
        case ast.Subscript(value=inner):
            return is_worded(inner, words)
    return False


def words_taken_apart(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Calls that look into our own words, or change them."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        words: set[str] = set()
        for node in ast.walk(function):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    words |= {name} if is_worded(value, words) else set()
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Attribute(value=text, attr=attr), args=arguments):
                    own = is_worded(text, words) and TAKES_APART.fullmatch(attr)
                    pattern = TAKES_APART.fullmatch(ast.unparse(node.func))
                    if own or (pattern and any(is_worded(one, words) for one in arguments)):
                        yield node.lineno, ast.unparse(node)


def test_no_code_reads_our_own_words() -> None:
    found = {
        f"{file}:{line} {call}"
        for file, tree in trees().items()
        if file.startswith(SPEAKS)
        for line, call in words_taken_apart(tree)
    }
    assert not found, "let what makes the words give their parts as data"


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("unusual_settings_words(s).replace(' · ', ', ')", 1),
        ("short = shortfall_words(1, 2)\n    short.removeprefix('needs ')", 1),
        ("s.mesh.in_words.removeprefix(' × ')", 1),
        ("point.refused.removeprefix('devices: ')", 1),
        ("error.problems[0].startswith('devices')", 1),
        ("re.sub('a', 'b', reason.words())", 1),
        ("show_long(3).partition(' ')", 1),
        ("path.name.removesuffix('.json')\n    re.sub('a', 'b', name)", 0),
        ("' and '.join(reason.words() for reason in reasons)", 0),
    ],
)
def test_words_taken_apart_are_detected(body: str, found: int) -> None:
    assert len(list(words_taken_apart(ast.parse(f"def f():\n    {body}")))) == found


# ---- text of others ------------------------------------------------------------------------------

# Calls that print or write, and the one file that makes them, where text of others is made visible.
WRITERS = {
    "print": "spec/foreign_text.py",
    "typer.echo": "",
    "typer.secho": "",
    "traceback.print_exc": "",
    "traceback.print_exception": "",
    "sys.stdout.write": "",
    "sys.stderr.write": "spec/progress.py",
    "Console": "report/screen.py",
    "csv.writer": "report/table.py",
    "Markup": "report/page/",
    "tomli_w.dumps": "spec/toml_text.py",
}


def test_text_of_others_is_printed_in_one_place() -> None:
    found = {
        f"{file}:{node.lineno} {called}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in WRITERS
        if not (WRITERS[called] and file.startswith(WRITERS[called]))
        # What is exported prints numbers of its own, where nothing of Shardwise is installed.
        if not file.startswith("stacks/program/")
    }
    assert not found, "use shardwise.spec.foreign_text or report.screen.plain_console"


# ---- sentences -----------------------------------------------------------------------------------

# What holds a sentence for people, as an attribute or as one of many; records hold the facts.
SENTENCES = {"notes", "unsupported", "in_script", "sentence", "sentences", "why", "reason", "words"}
ONE_OF_THEM = {"note", "sentence", "why", "reason"}
READS = {"startswith", "endswith", "replace", "removeprefix", "removesuffix", "partition",
         "rpartition", "split", "find", "index"}  # fmt: skip


def read_sentences(tree: ast.AST) -> Iterator[str]:
    """Places that read one of our own sentences by its text."""

    def is_sentence(node: ast.AST) -> bool:
        match node:
            case ast.Attribute(attr=name):
                return name in SENTENCES
            case ast.Name(id=name):
                return name in ONE_OF_THEM
        return False

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=receiver, attr=name)) if name in READS:
                texts = [receiver]
            case ast.Call(func=ast.Attribute(value=ast.Name(id="re")), args=texts):
                pass
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=texts):
                pass
            case _:
                continue
        if any(map(is_sentence, texts)):
            yield f"{node.lineno} {ast.unparse(node)}"


def test_no_sentence_decides() -> None:
    found = [f"{file}:{one}" for file, tree in trees().items() for one in read_sentences(tree)]
    assert not found, "decide by the fields of a record, not by its words"


@pytest.mark.parametrize(
    "source",
    [
        "one.why.startswith('a')",
        "[note for note in reading.notes if not note.startswith('fsdp_')]",
        "rule.sentence.replace('the Trainer', who)",
        "re.match('a', loss.unsupported)",
        "'a' in reading.notes",
    ],
)
def test_decisions_by_sentences_are_seen(source: str) -> None:
    assert len(list(read_sentences(ast.parse(source)))) == 1


# ---- children ------------------------------------------------------------------------------------

# What starts a process, and who may, besides `shardwise.launch.child`.
STARTERS = re.compile(
    r"(subprocess|asyncio|os|multiprocessing)\.(Popen|run|call|check_\w+|create_subprocess_\w+|"
    r"exec\w+|spawn\w+|posix_spawn\w*|system|popen|Process)|Popen|ProcessPoolExecutor|spawn"
)
MAY_START = {
    "launch/child.py": "starts interpreters that import nothing from the working directory",
    "web/workers.py": "asyncio, with the command of launch/child.py",
    "trials/accept/victim.py": "the command it is given, which is that of launch/child.py",
    "launch/slurm.py": "scontrol, which is no Python",
    "observe/summary.py": "a pool, protected by the variable that launch/child.py sets",
    "checkpoint/verify/scan.py": "a pool, protected by the variable that launch/child.py sets",
}


def test_children_are_started_in_one_place() -> None:
    found = {
        f"{file}:{node.lineno} {called}"
        for file, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and STARTERS.fullmatch(called := ast.unparse(node.func))
        if file not in MAY_START
    }
    assert not found, "use shardwise.launch.child, or say why not in MAY_START"
    interpreters = {
        file
        for file, tree in trees().items()
        if any(ast.unparse(node) == "sys.executable" for node in ast.walk(tree))
    }
    assert interpreters == {"launch/child.py"}


# ---- rooms ---------------------------------------------------------------------------------------

ROOM = re.compile(r"^  (\w+)/ +(\S.*)$", re.MULTILINE)


def test_the_architecture_page_is_the_docstrings_of_the_rooms_in_the_order_of_imports() -> None:
    page = (SOURCE.parent / "docs" / "architecture.md").read_text()
    listed = dict(ROOM.findall(page))
    folders = [file.parent for file in FILES if file.name == "__init__.py"]
    docstrings = {
        folder.name: (ast.get_docstring(trees()[f"{folder.name}/__init__.py"]) or "").split("\n")[0]
        for folder in folders
        if folder.parent == SOURCE / "shardwise"
    }
    assert listed == docstrings
    rules = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    rows = [re.findall(r"shardwise\.(\w+)", row) for row in rules["contracts"][0]["layers"]]
    height = {room: number for number, row in enumerate(rows) for room in row}
    assert [height[room] for room in listed] == sorted(height[room] for room in listed)

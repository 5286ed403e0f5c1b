"""Short chains of ops in which simplification by a compiler may go wrong, for the sweep of special values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

FLOATS, INTEGERS, BOTH = (True,), (False,), (True, False)
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Chain:
    """A function of `operands` tensors of special values; with 0, of one table of them. `floats`: of which types."""

    function: Callable[..., Any]
    operands: int = 1
    floats: tuple[bool, ...] = FLOATS
    elementwise: bool = True


def _one(function: Callable[..., Any], floats: tuple[bool, ...] = FLOATS) -> Chain:
    return Chain(function, 1, floats)


def _two(function: Callable[..., Any], floats: tuple[bool, ...] = FLOATS) -> Chain:
    return Chain(function, 2, floats)


def _table(function: Callable[..., Any]) -> Chain:
    return Chain(function, 0, FLOATS, elementwise=False)


CHAINS = {
    "x*0": _one(lambda x: x * 0, BOTH),
    "x*0.0": _one(lambda x: x * 0.0, BOTH),
    "x*-0.0": _one(lambda x: x * -0.0),
    "0*x": _one(lambda x: 0 * x, BOTH),
    "x*zeros": _one(lambda x: x * torch.zeros_like(x), BOTH),
    "x*zeros(())": _one(lambda x: x * torch.zeros((), dtype=x.dtype), BOTH),
    "mul in place by 0": _one(lambda x: x.clone().mul_(0), BOTH),
    "x-x": _one(lambda x: x - x, BOTH),
    "x/x": _one(lambda x: x / x, BOTH),
    "x*1": _one(lambda x: x * 1, BOTH),
    "x*ones": _one(lambda x: x * torch.ones_like(x), BOTH),
    "x/ones": _one(lambda x: x / torch.ones_like(x), BOTH),
    "x*-1": _one(lambda x: x * -1, BOTH),
    "x+0": _one(lambda x: x + 0, BOTH),
    "x+0.0": _one(lambda x: x + 0.0, BOTH),
    "x+-0.0": _one(lambda x: x + -0.0),
    "x-0": _one(lambda x: x - 0, BOTH),
    "x--0.0": _one(lambda x: x - -0.0),
    "x+zeros": _one(lambda x: x + torch.zeros_like(x), BOTH),
    "zeros+x": _one(lambda x: torch.zeros_like(x) + x, BOTH),
    "x-zeros": _one(lambda x: x - torch.zeros_like(x), BOTH),
    "x-negative zeros": _one(lambda x: x - torch.full_like(x, -0.0)),
    "x+negative zeros": _one(lambda x: x + torch.full_like(x, -0.0)),
    "0-x": _one(lambda x: 0 - x, BOTH),
    "zeros-x": _one(lambda x: torch.zeros_like(x) - x, BOTH),
    "-(x-x)": _one(lambda x: -(x - x), BOTH),
    "-(a-b)": _two(lambda a, b: -(a - b), BOTH),
    "-(a*b)": _two(lambda a, b: -(a * b), BOTH),
    "-(a+b)": _two(lambda a, b: -(a + b), BOTH),
    "(a+b)-b": _two(lambda a, b: (a + b) - b, BOTH),
    "(a-b)+b": _two(lambda a, b: (a - b) + b, BOTH),
    "(a*b)/b": _two(lambda a, b: (a * b) / b, FLOATS),
    "(a/b)*b": _two(lambda a, b: (a / b) * b, FLOATS),
    "a/b": _two(lambda a, b: a / b, BOTH),
    "1/(1/x)": _one(lambda x: 1 / (1 / x)),
    "x*x/x": _one(lambda x: x * x / x),
    "x*x*0.5": _one(lambda x: x * x * 0.5),
    "2*x/2": _one(lambda x: 2 * x / 2),
    "x/3": _one(lambda x: x / 3, BOTH),
    "x/1e30": _one(lambda x: x / 1e30),
    "x/0": _one(lambda x: x / 0),
    "x**0": _one(lambda x: x**0, BOTH),
    "x**0.0": _one(lambda x: x**0.0),
    "x**1": _one(lambda x: x**1, BOTH),
    "x**2": _one(lambda x: x**2, BOTH),
    "x**3": _one(lambda x: x**3, BOTH),
    "x**-1": _one(lambda x: x**-1),
    "x**-2": _one(lambda x: x**-2),
    "x**0.5": _one(lambda x: x**0.5),
    "x**-0.5": _one(lambda x: x**-0.5),
    "x**1.5": _one(lambda x: x**1.5),
    "x**64": _one(lambda x: x**64, BOTH),
    "x**inf": _one(lambda x: x**INF),
    "x**nan": _one(lambda x: x**NAN),
    "0**x": _one(lambda x: 0**x),
    "1**x": _one(lambda x: 1**x),
    "2**x": _one(lambda x: 2**x),
    "(-2)**x": _one(lambda x: (-2.0) ** x),
    "sqrt(x**2)": _one(lambda x: (x**2).sqrt()),
    "sqrt(x)**2": _one(lambda x: x.sqrt() ** 2),
    "exp(log(x))": _one(lambda x: x.log().exp()),
    "log(exp(x))": _one(lambda x: x.exp().log()),
    "sin(atan(x))": _one(lambda x: x.atan().sin()),
    "cos(atan(x))": _one(lambda x: x.atan().cos()),
    "rsqrt(x)*sqrt(x)": _one(lambda x: x.rsqrt() * x.sqrt()),
    "sigmoid(x)*x": _one(lambda x: x.sigmoid() * x),
    "where(x>0,x,0)": _one(lambda x: torch.where(x > 0, x, 0), BOTH),
    "where(isnan,0,x)": _one(lambda x: torch.where(x.isnan(), 0.0, x)),
    "where(x==x,1,2)": _one(lambda x: torch.where(x == x, 1.0, 2.0)),
    "where(x!=x,1,2)": _one(lambda x: torch.where(x != x, 1.0, 2.0)),
    "not(a<b)": _two(lambda a, b: ~(a < b), BOTH),
    "not(a>=b)": _two(lambda a, b: ~(a >= b), BOTH),
    "where(a<b,a,b)": _two(lambda a, b: torch.where(a < b, a, b), BOTH),
    "where(a>b,a,b)": _two(lambda a, b: torch.where(a > b, a, b), BOTH),
    "where(a>b,b,a)": _two(lambda a, b: torch.where(a > b, b, a), BOTH),
    "where(x>=0,x,-x)": _one(lambda x: torch.where(x >= 0, x, -x), BOTH),
    "maximum(x,0)": _one(lambda x: torch.maximum(x, torch.zeros_like(x)), BOTH),
    "minimum(x,nan)": _one(lambda x: torch.minimum(x, torch.full_like(x, NAN))),
    "relu(x)": _one(lambda x: x.relu(), BOTH),
    "clamp(x,-1,1)": _one(lambda x: x.clamp(-1, 1), BOTH),
    "clamp(x,min=0)": _one(lambda x: x.clamp(min=0), BOTH),
    "clamp(x,nan)": _one(lambda x: x.clamp(min=NAN)),
    "clamp(x,2,1)": _one(lambda x: x.clamp(2, 1), BOTH),
    "clamp of tensors": _two(lambda a, b: torch.clamp(a, b, b + 1), BOTH),
    "nan_to_num(x*0)": _one(lambda x: (x * 0).nan_to_num(nan=5.0)),
    "isnan(x*0)": _one(lambda x: (x * 0).isnan()),
    "isnan(x)": _one(lambda x: x.isnan()),
    "isinf(x)": _one(lambda x: x.isinf()),
    "isfinite(x+x)": _one(lambda x: (x + x).isfinite()),
    "isposinf(x)": _one(lambda x: x.isposinf()),
    "signbit(x)": _one(lambda x: x.signbit(), BOTH),
    "signbit(-x)": _one(lambda x: (-x).signbit(), BOTH),
    "signbit(0-x)": _one(lambda x: (0 - x).signbit()),
    "sign(x)": _one(lambda x: x.sign(), BOTH),
    "sign(x)*abs(x)": _one(lambda x: x.sign() * x.abs(), BOTH),
    "copysign(1,x)": _one(lambda x: torch.copysign(torch.ones_like(x), x)),
    "abs(-x)": _one(lambda x: (-x).abs(), BOTH),
    "bool(x)": _one(lambda x: x.bool(), BOTH),
    "logical_not(x)": _one(lambda x: x.logical_not(), BOTH),
    "x and x": _two(lambda a, b: torch.logical_and(a, b), BOTH),
    "hypot(x,x)": _one(lambda x: torch.hypot(x, x)),
    "atan2(x,x)": _one(lambda x: torch.atan2(x, x)),
    "fmod(x,1)": _one(lambda x: torch.fmod(x, 1), BOTH),
    "remainder(x,1)": _one(lambda x: torch.remainder(x, 1), BOTH),
    "remainder(1,x)": _one(lambda x: torch.remainder(1, x)),
    "remainder(x,-3)": _one(lambda x: torch.remainder(x, -3), BOTH),
    "x//3": _one(lambda x: x // 3, BOTH),
    "x//-3": _one(lambda x: x // -3, BOTH),
    "x//0.1": _one(lambda x: x // 0.1),
    "1//x": _one(lambda x: torch.floor_divide(torch.ones_like(x), x)),
    "x//0": _one(lambda x: x // 0),
    "div floor": _one(lambda x: torch.div(x, 7, rounding_mode="floor"), BOTH),
    "div trunc": _one(lambda x: torch.div(x, 7, rounding_mode="trunc"), BOTH),
    "div trunc tensors": _two(lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "floor(x)": _one(lambda x: x.floor(), BOTH),
    "round(x)": _one(lambda x: x.round(), BOTH),
    "round(x,1)": _one(lambda x: x.round(decimals=1)),
    "frac(x)": _one(lambda x: x.frac()),
    "trunc(-x)": _one(lambda x: (-x).trunc()),
    "lerp(a,b,0)": _two(lambda a, b: torch.lerp(a, b, 0.0)),
    "lerp(a,b,1)": _two(lambda a, b: torch.lerp(a, b, 1.0)),
    "lerp(a,b,.3)": _two(lambda a, b: torch.lerp(a, b, 0.3)),
    "addcmul 0": _two(lambda a, b: torch.addcmul(a, a, b, value=0)),
    "addcdiv 0": _two(lambda a, b: torch.addcdiv(a, a, b, value=0)),
    "addcdiv": _two(lambda a, b: torch.addcdiv(a, a, b, value=0.5)),
    "add alpha 0": _two(lambda a, b: torch.add(a, b, alpha=0), BOTH),
    "sub alpha 0": _two(lambda a, b: torch.sub(a, b, alpha=0), BOTH),
    "add alpha 2": _two(lambda a, b: torch.add(a, b, alpha=2), BOTH),
    "xlogy(0,x)": _one(lambda x: torch.xlogy(torch.zeros_like(x), x)),
    "softshrink": _one(lambda x: functional.softshrink(x)),
    "hardshrink": _one(lambda x: functional.hardshrink(x)),
    "threshold": _one(lambda x: functional.threshold(x, 0.1, 20)),
    "hardtanh": _one(lambda x: functional.hardtanh(x)),
    "x.half().float()": _one(lambda x: x.half().float()),
    "x.bfloat16().float()": _one(lambda x: x.bfloat16().float()),
    "x.half()*2": _one(lambda x: (x.half() * 2).float()),
    "half products": _two(lambda a, b: (a.half() * b.half()).float() * 0.25),
    "half product and quotient": _two(lambda a, b: (a.half() * b.half()) / b.half()),
    "bfloat16 sum and difference": _two(lambda a, b: (a.bfloat16() + b.bfloat16()) - b.bfloat16()),
    "half there, back and there": _one(lambda x: (x.half().float() + 0.1).half().double()),
    "x.float().half()": _one(lambda x: x.float().half()),
    "x.double().float()": _one(lambda x: x.double().float()),
    "x.float().double()": _one(lambda x: x.float().double(), BOTH),
    "x.bfloat16().half().float()": _one(lambda x: x.bfloat16().half().float()),
    "x.half().bfloat16().float()": _one(lambda x: x.half().bfloat16().float()),
    "int there and back": _one(lambda x: x.clamp(-1e4, 1e4).nan_to_num().int().to(x.dtype)),
    "x.long().float()": _one(lambda x: x.long().float(), INTEGERS),
    "bool there and back": _one(lambda x: x.bool().to(x.dtype), BOTH),
    "int8": _one(lambda x: x.to(torch.int8), INTEGERS),
    "uint8": _one(lambda x: x.to(torch.uint8), INTEGERS),
    "int16": _one(lambda x: x.to(torch.int16).to(x.dtype), INTEGERS),
    "int32": _one(lambda x: x.to(torch.int32), INTEGERS),
    "int32 there and back": _one(lambda x: x.to(torch.int32).to(torch.int64), INTEGERS),
    "int to half": _one(lambda x: x.half(), INTEGERS),
    "int to float and back": _one(lambda x: (x.clamp(-(1 << 30), 1 << 30)).float().long(), INTEGERS),
    "int overflow": _two(lambda a, b: a * b + a, INTEGERS),
    "int max + 1": _one(lambda x: x + 1, INTEGERS),
    "x+1>x": _one(lambda x: x + 1 > x, INTEGERS),
    "abs(int)": _one(lambda x: x.abs(), INTEGERS),
    "(x*2)//2": _one(lambda x: (x * 2) // 2, INTEGERS),
    "x<<1": _one(lambda x: x << 1, INTEGERS),
    "shift left": _two(lambda a, b: a << b, INTEGERS),
    "shift right": _two(lambda a, b: a >> b, INTEGERS),
    "(x<<3)>>3": _one(lambda x: (x << 3) >> 3, INTEGERS),
    "int mean": _one(lambda x: x.double().mean(), INTEGERS),
    "sum of ints": Chain(lambda x: (x.sum(), x.prod()), 1, INTEGERS, elementwise=False),
    "sum of nothing": _table(lambda x: (x[:0].sum(0), x[:0].sum(), x[:0].prod(0), x[:, :0].mean(1))),
    "extremes": _table(lambda x: (x.amax(1), x.amin(1), x.argmax(1), x.argmin(1), *x.max(1), *x.min(0))),
    "var": _table(lambda x: (x.var(1), x.std(0), x.var(correction=0), *torch.var_mean(x, 1))),
    "var of constants": _table(lambda x: _constants(x).var(1)),
    "var of large constants": _table(lambda x: (_constants(x) * 1e3 + 1e4).var(1)),
    "layer norm of constants": _table(lambda x: functional.layer_norm(_constants(x), x.shape[1:])),
    "layer norm": _table(lambda x: functional.layer_norm(x, x.shape[1:])),
    "batch norm": _table(lambda x: functional.batch_norm(x, None, None, training=True)),
    "mean of constants": _table(lambda x: _constants(x).mean(1)),
    "mean": _table(lambda x: (x.mean(1), x.mean(0), x.sum(1), x.nansum(1))),
    "softmax": _table(lambda x: (x.softmax(1), x.log_softmax(1), x.softmax(0))),
    "softmax*scale": _table(lambda x: (x * 0.125).softmax(1)),
    "softmax/scale": _table(lambda x: (x / -3.0).softmax(1)),
    "softmax of -inf": _table(lambda x: torch.full_like(x, -INF).softmax(1)),
    "softmax masked": _table(lambda x: x.masked_fill(x > 0, -INF).softmax(1)),
    "logsumexp": _table(lambda x: (x.logsumexp(1), torch.full_like(x, -INF).logsumexp(1))),
    "logsumexp of inf": _table(lambda x: torch.full_like(x, INF).logsumexp(1)),
    "logaddexp": _two(lambda a, b: torch.logaddexp(a, b)),
    "norms": _table(
        lambda x: (x.norm(), x.norm(INF), x.norm(1, dim=1), x.norm(0.5, dim=1), x.norm(3, dim=1))
    ),
    "cumsum": _table(lambda x: (x.cumsum(1), x.cumsum(0), x.cumprod(1), x.cummax(1)[0], x.logcumsumexp(1))),
    "any, all": _table(lambda x: (x.any(1), x.all(1), (x > 0).any(0), (x * 0).any(1))),
    "prod": _table(lambda x: (x.prod(1), x.prod())),
    "sort": _table(lambda x: (x.sort(1)[0], x.topk(3)[0], x.median(1)[0], x.kthvalue(2, 1)[0])),
    "losses": _table(
        lambda x: (
            functional.mse_loss(x, x.flip(0)),
            functional.smooth_l1_loss(x, x.flip(0), reduction="none"),
            functional.huber_loss(x, x.flip(0), reduction="none"),
            functional.binary_cross_entropy_with_logits(x, x.flip(0), reduction="none"),
            functional.cross_entropy(x, torch.arange(len(x)), reduction="none"),
            functional.kl_div(x, x.flip(0), reduction="none"),
        )
    ),
}


def _constants(x: torch.Tensor) -> torch.Tensor:
    """Rows of the first value of each."""
    return x[:, :1].expand(x.shape).contiguous()

"""The memory rule of rule.py in one kernel, its backward pass in another, and dense products for a CPU.

A memory is many small matrices, one step after the other.  Stock tensor operations launch many small kernels for it;
here one kernel runs the recurrence over all heads and chunks.  The file reads downwards: matrices inside a kernel,
which have the operations of Tensors, so that rule.gradients and rule.newton_schulz serve both; `Kernel`, which makes
loop nests of them and their adjoints; dense products (`matmul`); the recurrence in one kernel, on a CPU (`fused`); its
sequential part in kernels, on a GPU (`states_by_kernel`, `steps_by_kernel`); and `memory`, which takes one of the
forms.
"""
from __future__ import annotations
import contextlib, copy, ctypes, functools, itertools, math, operator, os, re, sqlite3, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, NamedTuple, cast
import numpy as np
from tinygrad import Device, Tensor, UOp, codegen, dtypes, helpers
from tinygrad.codegen import do_to_program
from tinygrad.dtype import AddrSpace
from tinygrad.engine.jit import JitError
from tinygrad.helpers import NUM_CPU_THREADS, Context, disable_gc
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.renderer import Estimates
from tinygrad.runtime.ops_cl import CLProgram
from tinygrad.runtime.ops_cpu import CPUProgram
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, PatternMatcher
from rule import (FEATURES, STEPS, Chunks, Gates, Memory, Rule, Weights, apply, at_base, by_expansion, by_ops,
                  feature_size, for_batch, gradients, monomial_scales, monomial_table, named, number, over_chunks,
                  part_of, phi, sizes, to_multiple, unpack, weighted_sums, with_entries)
from rule import newton_schulz  # noqa: F401  # part of the interface, with phi, apply and feature_size

# tinygrad's CPU device calls clang.  The `cpu` extra puts one beside this Python that is newer than most systems' own.
clang = Path(sys.executable).parent / "clang"
if "CC" not in os.environ and clang.exists(): os.environ["CC"] = str(clang)

# tinygrad's worker processes end after so many kernels, 16 unless given, and a new one is slow at first.
os.environ.setdefault("BEAM_MAX_TASKS_PER_CHILD", "1000")

@functools.cache
def database() -> sqlite3.Connection:
  """tinygrad's database of compiled kernels, open to all threads: a server answers in threads of its own."""
  os.makedirs(os.path.dirname(helpers.CACHEDB), exist_ok=True)
  connection = sqlite3.connect(helpers.CACHEDB, 60, isolation_level="IMMEDIATE", check_same_thread=False)
  connection.execute("PRAGMA journal_mode=WAL").fetchone()
  return connection
vars(helpers)["db_connection"] = database

# *** all cores of a CPU ***

# tinygrad cuts a large kernel of a CPU into parts, as many as NUM_CPU_THREADS at most, and runs them one after another.
# Here a thread for each core runs them: ctypes gives up Python's lock while a part runs.
ALL_CORES = NUM_CPU_THREADS.value                          # as counted by tinygrad, or set by the variable of that name
SCRATCH = ("values", "grads")  # names of arguments that hold the scratch memory of all parts
HAND_OVER = 150e-6            # seconds of a kernel below which handing its parts to threads costs more than it gains
serial_call = CPUProgram.__call__

@functools.cache
def threads(process:int, number:int) -> ThreadPoolExecutor:
  """Threads of a process: one that was forked has none of its parent's."""
  return ThreadPoolExecutor(number)

def parallel_call(program:Any, *buffers:Any, global_size:tuple=(1, 1, 1), vals:tuple=(), **options:Any) -> float|None:
  """CPUProgram.__call__ with the parts of a kernel on all cores.  The first two calls run its parts one after another,
  and their time decides.  Parts that run side by side have scratch memory of their own: they get other pointers,
  because clang takes three times as long for a kernel that computes where its scratch begins.  No exception leaves a
  part running, since its buffers would be freed."""
  start, workers = time.perf_counter(), min(global_size[0], NUM_CPU_THREADS.value)
  slot, seconds = program.runtimevars.get("core_id"), program.__dict__.setdefault("seconds", [])
  if workers == 1 or slot is None or program.lvp or len(seconds) < 2 or min(seconds) < HAND_OVER:
    result = serial_call(program, *buffers, global_size=global_size, vals=vals, **options)
    if len(seconds) < 2: seconds.append(time.perf_counter() - start)
    return result
  strides = [4 * shape[0] // global_size[0] if name in SCRATCH else 0 for name, _, _, shape in program.signature]
  def run(first:int) -> None:
    for part in range(first, global_size[0], workers):
      numbers = [buffer.va_addr + part * stride for buffer, stride in zip(buffers, strides)] + list(vals)
      numbers[slot] = part
      program.fxn(*map(ctypes.c_uint64, numbers))
  futures, fault = [threads(os.getpid(), workers - 1).submit(run, first) for first in range(1, workers)], None
  try: run(0)
  except BaseException as e: fault = e
  while not all(future.done() for future in futures):
    try: wait(futures)
    except BaseException as e: fault = e                   # Ctrl-C
  if fault: raise fault
  return time.perf_counter() - start

CPUProgram.__call__ = parallel_call                        # type: ignore[method-assign, assignment]

# *** OpenCL ***

load_program = CLProgram.__init__
def load_numbered(program:Any, device:Any, code:Any) -> None:
  """CLProgram.__init__ with the arguments numbered anew.  A kernel gets the buffers that it uses, in order.  tinygrad's
  OpenCL looks them up by numbers that count the unused ones as well, and fails."""
  slots = sorted({slot for _, slot, *_ in code.signature})
  signature = tuple((name, slots.index(slot), *kind) for name, slot, *kind in code.signature)
  load_program(program, device, replace(code, signature=signature))

CLProgram.__init__ = load_numbered                         # type: ignore[method-assign, assignment]

# *** registers, threads and tiles ***

def on_cpu(device) -> bool:
  """Whether it is one CPU device; a tuple of devices is none."""
  return isinstance(device, str) and device.startswith("CPU")

class Vectors(NamedTuple):
  """What runs a kernel: a core of a CPU with its vector registers, or the threads of a work-group of a GPU."""
  lanes:int                                 # numbers in a register
  registers:int
  long_counters:bool = False                # whether the compiler needs loop counters of 64 bits, see compiled
  threads:int = 1
  local:int = 0                             # numbers of LOCAL memory, which the threads share

THREADS = 256                               # of a work-group, at most

@functools.cache
def vectors(device:str) -> Vectors:
  """The registers that the compiler of a CPU uses: seen in what it makes of a loop.  A thread of a GPU has no vectors,
  and there kernels of this file take at most half of what most multiprocessors have of LOCAL memory."""
  renderer:Any = Device[device].renderer
  if not on_cpu(device):
    shared = 16_384 if device.startswith("WEBGPU") else min(renderer.shared_max, 49_152)         # bytes
    return Vectors(1, 32, threads=min(THREADS, renderer.local_max[0]), local=shared // 4)
  compiler = renderer.compiler
  if not hasattr(compiler, "args"): return Vectors(8, 16)
  options = [f"--target={compiler.arch}-none-unknown-elf", *compiler.args, "-O2", "-x", "c", "-", "-S", "-o", "-"]
  source = b"""
    void loop(float *x) { for (int i = 0; i < 4096; i++) x[i] *= 2; }
    #ifdef __AVX512VL__
    void twice_the_registers(void) {}
    #endif
    #if __clang_major__ < 16
    void long_counters(void) {}
    #endif"""
  assembly = subprocess.check_output([os.environ.get("CC", "clang"), *options], input=source)
  long = b"long_counters" in assembly
  if b"zmm" in assembly: return Vectors(16, 32, long)
  if b"ymm" in assembly: return Vectors(8, 32 if b"twice" in assembly else 16, long)
  return Vectors(4, 32 if b".4s" in assembly else 16, long)            # NEON; SSE

@functools.cache
def tile_shape(R:int, C:int, vectors:Vectors) -> tuple[int, int]:
  """Rows and columns of a product (R,C) whose sums stay in registers.  For each term the inner loop loads a number of
  every row and the vectors of the columns: the tile with the most multiplications a load is best, if every thread gets
  a tile."""
  def loads(columns): return -(-columns // vectors.lanes)
  columns = [n for n in range(1, min(C, 4 * vectors.lanes) + 1) if C % n == 0]
  columns = [n for n in columns if n % vectors.lanes == 0] or columns
  rows, most = [n for n in (1, 2, 3, 4, 6) if R % n == 0], vectors.registers * 3 // 4
  shapes = [(r, c) for r in rows for c in columns if r * loads(c) <= most and r * c <= max(R * C // vectors.threads, 1)]
  return max(shapes, key=lambda shape: (shape[0] * shape[1] / (shape[0] + loads(shape[1])), shape[1]))

# *** matrices inside a kernel ***

@functools.cache
def symbol(name:str) -> UOp:
  return UOp.variable(name, -1.0, 1.0, dtypes.float)
ROW, COLUMN = UOp.variable("i", 0, 1 << 24), UOp.variable("j", 0, 1 << 24)

def substituted(u:UOp, known:dict[UOp, UOp]) -> UOp:
  """u with its symbols replaced.  What replaces them may lie deep inside other loops and is not searched."""
  if u not in known:
    known[u] = u.replace(src=tuple(substituted(s, known) for s in u.src)) if u.src else u
  return known[u]

def divisor(n:int, *preferred:int) -> int:
  """The first of the preferred numbers that divides n, or else the largest divisor that is not above them."""
  for size in preferred:
    if n % size == 0: return size
  return max(size for size in range(1, max(preferred) + 1) if n % size == 0)

def constant(x:float) -> UOp: return UOp.const(x, dtypes.float)

def product_of(factors:list) -> Any:
  return functools.reduce(operator.mul, factors)

class Matrix:
  """An expression.  Element (i, j) is f(i, j, *elements (i, j) of the stored matrices `leaves`); a leaf of one row or
  column repeats it.  Its operations are those of a Tensor of two axes, and what they cannot do they refuse."""
  dtype = dtypes.float
  def __init__(self, kernel:Kernel, shape:tuple[int, ...], leaves:tuple[Stored, ...], f:Any):
    self.kernel, self.shape, self.leaves, self.f = kernel, shape, leaves, f
  def map(self, op, *others:Any):
    """op on every element, and on those of the others, which are matrices or numbers."""
    parts = [self.operand(x) for x in (self, *others)]
    leaves = tuple(dict.fromkeys(leaf for p in parts for leaf in p.leaves))
    places = [[leaves.index(leaf) for leaf in p.leaves] for p in parts]
    def f(i, j, *x):
      return op(*[p.f(i, j, *[x[n] for n in at]) for p, at in zip(parts, places)])
    shape = np.broadcast_shapes(*[p.shape for p in parts])
    return Matrix(self.kernel, shape, leaves, f)
  def operand(self, x):
    if isinstance(x, Product): return x.stored()
    return x if isinstance(x, Matrix) else Matrix(self.kernel, (1, 1), (), lambda i, j: x)
  def __add__(self, other):
    return other + self if isinstance(other, Product) else self.map(lambda x, y: x + y, other)
  def __sub__(self, other):
    return -other + self if isinstance(other, Product) else self.map(lambda x, y: x - y, other)
  def __mul__(self, other):
    return self.map(lambda x, y: x * y, other)
  def __neg__(self): return self * -1.0
  def __radd__(self, other): return self + other
  def __rsub__(self, other): return -self + other
  def __rmul__(self, other): return self * other
  def __pow__(self, n):
    if type(n) is not int or n < 1: raise NotImplementedError(f"a matrix inside a kernel to the power of {n!r}")
    return self.map(lambda x: product_of([x] * n))
  def __matmul__(self, other):
    if self.shape[1] != other.shape[0]: raise ValueError(f"matrices of {self.shape} and {other.shape} do not multiply")
    return Product(self.kernel, self.stored(), other.stored())
  def square(self): return self ** 2
  def rsqrt(self): return self.map(lambda x: 1 / x.sqrt())
  def minimum(self, other):
    return self.map(lambda x, y: x.minimum(y), other)
  def sigmoid(self): return self.kernel.sigmoid(self)
  def sum(self, axis=(-2, -1), keepdim=False):
    axes = {n % 2 for n in ((axis,) if isinstance(axis, int) else axis)}
    if not keepdim: raise NotImplementedError("a sum inside a kernel keeps its axes: give keepdim=True")
    return self.kernel.sum(self, axes)
  def mean(self, axis=(-2, -1), keepdim=False):
    total = self.sum(axis, keepdim)
    return total * (total.shape[0] * total.shape[1] / (self.shape[0] * self.shape[1]))
  def cat(self, other, dim=0):
    if dim % 2 != 1: raise NotImplementedError(f"matrices inside a kernel are joined along dim=-1, not dim={dim}")
    R, n, m = max(self.shape[0], other.shape[0]), self.shape[1], other.shape[1]
    out = self.kernel.new((R, n + m))
    self.kernel.assign(out.block(0, R, 0, n), self)
    self.kernel.assign(out.block(0, R, n, m), other)
    return out
  def transpose(self, dim0=-2, dim1=-1):
    if {dim0 % 2, dim1 % 2} != {0, 1}: raise NotImplementedError(f"transpose({dim0}, {dim1}) inside a kernel")
    return self.stored().swapped()
  def eye(self, n, dtype=dtypes.float):
    if dtype != dtypes.float: raise NotImplementedError(f"matrices inside a kernel are float32, not {dtype}")
    return Matrix(self.kernel, (n, n), (), lambda i, j: i.eq(j).where(constant(1.0), constant(0.0)))
  def iterate(self, steps, body, carry):
    def turn(_, now, then):
      for m, value in zip(then, body(*now)): self.kernel.assign(m, value)
    return tuple(self.kernel.scan(steps, turn, carry)(steps))
  def contiguous(self): return self.stored()
  def contiguous_backward(self): return self
  def stored(self):
    return self.kernel.assign(self.kernel.new(self.shape, self.leaves), self)
  def flip(self):
    """The transposed expression."""
    leaves = tuple(m.transpose() for m in self.leaves)
    return Matrix(self.kernel, self.shape[::-1], leaves, lambda i, j, *x: self.f(j, i, *x))

class Product(Matrix):
  """start + scale x y, computed where it is first needed.  Terms that are added become the start of its sums."""
  def __init__(self, kernel:Kernel, x:Stored, y:Stored, start:Matrix|None=None, scale:float=1.0):
    super().__init__(kernel, (x.shape[0], y.shape[1]), (), None)
    self.x, self.y, self.start, self.scale = x, y, start, scale
    self.place:Stored|None = None
  def __add__(self, other):
    if isinstance(other, Product): other = other.stored()
    return Product(self.kernel, self.x, self.y, other if self.start is None else self.start + other, self.scale)
  def __sub__(self, other): return self + -other
  def __mul__(self, other):
    if not isinstance(other, float): return self.stored() * other
    return Product(self.kernel, self.x, self.y, self.start and self.start * other, self.scale * other)
  def stored(self):
    if self.place is None:               # column by column where that saves copying the larger factor
      thin = self.x.rows == 1 or self.x.shape[0] < self.y.shape[1]
      tall = self.y.cols != 1 and self.shape[0] > 1 and thin
      place = self.kernel.new(self.shape[::-1]).transpose() if tall else self.kernel.new(self.shape)
      self.place = self.kernel.assign(place, self)
    return self.place

class Stored(Matrix):
  """A matrix in memory: element (i, j) lies at start + i rows + j cols of a buffer.  A buffer of None means that the
  value is not wanted.  `grad` is where its gradient is stored, if it has one; `row` maps row numbers to rows of
  memory."""
  def __init__(self, kernel:Kernel, buffer:UOp|None, shape:tuple[int, ...], start:Any, rows:int, cols:int=1,
               grad:Any=None, row:Callable|None=None):
    super().__init__(kernel, shape, (self,), lambda i, j, x: x)
    self.buffer, self.start, self.rows, self.cols, self.grad, self.row = buffer, start, rows, cols, grad, row
    self.tall = cols != 1 == rows                # columns lie along memory
  def at(self, i, j):
    if self.shape[0] == 1: i = 0
    if self.shape[1] == 1: j = 0
    return self.start + (self.row(i) if self.row else i) * self.rows + j * self.cols
  def view(self, shape, start, rows, cols):
    """Other rows and columns of the same memory, and of its gradient."""
    def make():
      grad = self.grad and self.grad.view(shape, start, rows, cols)
      return Stored(self.kernel, self.buffer, shape, self.start + start, rows, cols, grad)
    return self.kernel.memo((self, shape, start, rows, cols), make)
  def swapped(self):
    return self.view(self.shape[::-1], 0, self.cols, self.rows)
  def block(self, i, R, j=0, C=None):
    """R rows from row i, and C columns from column j (None: all)."""
    return self.view((R, self.shape[1] if C is None else C), i * self.rows + j * self.cols, self.rows, self.cols)
  def stored(self): return self
  def overlaps(self, other):
    """Whether some number may belong to both."""
    if self.buffer is not other.buffer: return False
    distance = self.kernel.distance(self.start, other.start)
    def ends(m):
      steps = [(n - 1) * step for n, step in zip(m.shape, (m.rows, m.cols))]
      return sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
    (low, high), (other_low, other_high) = ends(self), ends(other)
    return distance.vmin + low <= other_high and distance.vmax + high >= other_low

class Kernel:
  """Loop nests in program order: each waits for the one before.

  The nests are fill, each (elementwise), add (elementwise, onto what is there), gather (a sum) and product.  Statements
  are made of nests (assign, sigmoid, sum, scan).  Each statement puts its adjoint, which is nests again, on the tape.
  The backward pass of a recurrence is therefore its own tape in reverse:
    Z = expression       dleaf += dexpression/dleaf * dZ, summed where the leaf repeats
    Z = start + s X Y    dX += s dZ Y^T,  dY += s X^T dZ,  dstart += dZ
    loop, with a carry   the loop in reverse, from what every turn has kept

  A kernel is built twice.  The first time it is `quiet`: it makes no code and only counts the scratch memory it
  needs.  On a GPU the threads of a work-group share the turns of a nest, with barriers between nests that touch the
  same memory."""
  def __init__(self, values:UOp, grads:UOp|None, quiet:bool, vectors:Vectors, local:int=0):
    self.values, self.grads, self.quiet = values, grads, quiet               # scratch for matrices and their gradients
    self.vectors, self.threads = vectors, vectors.threads
    self.local = UOp.placeholder((max(local, 1),), dtypes.float, 9999, addrspace=AddrSpace.LOCAL)    # more scratch
    self.used_local, self.most_local = 0, 0
    self.thread, self.gate = UOp.const(0), cast(UOp|None, None)              # which one; whether it has a turn
    self.touched:list[tuple[Stored, bool]] = []                              # since the last barrier; whether written
    self.nests = 0
    self.origin:Any = 0                                                      # where the scratch of this turn begins
    self.grads_origin:Any = 0
    self.used, self.used_grads = 0, 0                                        # numbers of scratch that are taken
    self.wait:tuple[UOp, ...] = ()                                           # what the next nest waits for
    self.tape:list[Callable]|None = None                                     # adjoints, while they are recorded
    self.memos:list[dict] = [{}]                                             # views and copies made in this loop
    self.keeping = False                                                     # every turn of a scan keeps its scratch
    self.ids, self.turns, self.flops = itertools.count(), 1, 0
  def memo(self, key, make):
    for known in self.memos:
      if key in known: return known[key]
    return self.memos[-1].setdefault(key, make())
  @contextlib.contextmanager
  def loop(self, size, kind=AxisType.LOOP):
    if size == 1 or self.quiet:
      yield UOp.const(0)
      return
    r, turns, nests = UOp.range(size, next(self.ids), kind), self.turns, self.nests
    if kind is not AxisType.LOCAL: self.turns *= size
    self.wait = (*self.wait, r)
    yield r
    if self.nests > nests: self.barrier()                  # the nests of the next turn come after those of this one
    self.wait, self.turns = (self.wait[0].end(r),), turns
  @contextlib.contextmanager
  def parts(self, number):
    """The parts of a kernel, one for a core or a work-group, whose threads run all that follows."""
    with self.loop(number, AxisType.GLOBAL) as part, self.loop(self.threads, AxisType.LOCAL) as self.thread: yield part
  @contextlib.contextmanager
  def shared(self, size):
    """A loop that the threads share: thread t takes the turns t, t + threads, ..."""
    if self.threads == 1:
      with self.loop(size) as i: yield i
      return
    with self.loop(-(-size // self.threads)) as m:
      i = m * self.threads + self.thread
      if size % self.threads: self.gate = i < size
      yield i
      self.gate = None
  def barrier(self):
    self.wait, self.touched = (UOp(Ops.BARRIER, src=self.wait),), []
  def order(self, reads, writes):
    """Before a nest: a barrier, if it reads what another thread may have written, or writes what one may have used."""
    if self.threads == 1 or self.quiet: return
    nest = [(m, False) for m in reads] + [(m, True) for m in writes if m.buffer is not None]
    def clash(m, m_written): return any((written or m_written) and m.overlaps(n) for n, written in self.touched)
    if any(itertools.starmap(clash, nest)): self.barrier()
    self.touched += nest
    self.nests += 1
  def distance(self, start, other_start):
    return self.memo((start, other_start), lambda: (UOp.const(0) + start - other_start).simplify())
  @contextlib.contextmanager
  def cells(self, shape, tall):
    """All (i, j) of a shape; the inner loop runs along memory: along the columns of a tall matrix."""
    if self.threads > 1:
      with self.shared(shape[0] * shape[1]) as n:
        outer, inner = n // shape[not tall], n % shape[not tall]
        yield (inner, outer) if tall else (outer, inner)
      return
    with self.loop(shape[tall]) as outer:
      with self.loop(shape[not tall]) as inner: yield (inner, outer) if tall else (outer, inner)
  def code(self, name, numbers):
    """All of it, for the compiler.  numbers: how many its arguments hold.  None when the kernel was quiet."""
    if not self.wait: return None
    estimates = Estimates(self.flops, 4 * numbers, 4 * numbers)
    return self.wait[0].sink(arg=KernelInfo(name, opts_to_apply=(), estimates=estimates), tag=1)
  def load(self, m, i, j, wait=None):
    assert m.buffer is not None
    return m.buffer.after(*(self.wait if wait is None else wait))[self.place(m, i, j)]
  def store(self, m, i, j, value):
    if self.quiet or m.buffer is None: return
    if isinstance(value, float): value = constant(value)
    self.wait = (m.buffer.after(*self.wait)[self.place(m, i, j)].store(value),)
  def place(self, m, i, j):
    """Where the gate is shut nothing is stored, and 0 is loaded."""
    at = m.at(i, j)
    return at if self.gate is None or m.buffer.addrspace is AddrSpace.REG else (UOp.const(0) + at).valid(self.gate)
  def new(self, shape, like=()):
    """Scratch memory for a matrix, in the order of the one it is made of; with a gradient while there is a tape."""
    if like and like[0].shape == shape and like[0].tall:
      return self.new(shape[::-1]).transpose()
    size, grad = shape[0] * shape[1], None
    if self.tape is None and not self.keeping and self.used_local + size <= self.vectors.local:
      self.used_local += size
      self.most_local = max(self.most_local, self.used_local)
      return Stored(self, self.local, shape, self.used_local - size, shape[1])
    if self.tape is not None:
      grad = Stored(self, self.grads, shape, self.grads_origin + self.used_grads, shape[1])
      self.used_grads += size
    self.used += size
    return Stored(self, self.values, shape, self.origin + (self.used - size), shape[1], 1, grad)
  def without_grad(self, shape):
    tape, self.tape = self.tape, None
    m = self.new(shape)
    self.tape = tape
    return m

  # nests
  def fill(self, buffer, start, size):
    if self.quiet: return
    line = Stored(self, buffer, (1, size), start, size)
    self.order([], [line])
    with self.shared(size) as j: self.store(line, 0, j, 0.0)
  def elements(self, leaves, i, j, wait):
    return [self.load(m, i, j, wait) for m in leaves]
  def each(self, out, f, leaves):
    """out[i,j] = f(i, j, elements)."""
    if self.quiet: return
    self.order(leaves, [out])
    before = self.wait
    with self.cells(out.shape, out.tall) as (i, j):
      self.store(out, i, j, f(i, j, *self.elements(leaves, i, j, before)))
  def add(self, outs, fs, leaves, shape):
    """Every out[i,j] += its f(i, j, elements), over shape; an out of one row or column takes the sum."""
    if self.quiet: return
    self.order(leaves, outs)
    before = self.wait
    with self.cells(shape, leaves[0].tall) as (i, j):
      values = self.elements(leaves, i, j, before)
      sums = [self.load(out, i, j) + f(i, j, *values) for out, f in zip(outs, fs)]
      for out, total in zip(outs, sums): self.store(out, i, j, total)
  def gather(self, out, f, leaves, shape):
    """out[i] += sum_j f(i, j, elements), for every row, or one sum for all when out has one element.  The inner loop
    adds to several lanes side by side, which do not wait for each other."""
    if self.threads > 1: return self.gather_shared(out, f, leaves, shape)
    if self.quiet: return
    tall = leaves[0].tall and shape[0] > 1
    if out.shape[1] > 1 or out.shape[0] > 1 and tall:
      return self.add([out], [f], leaves, shape)
    if tall:
      return self.gather(out, lambda i, j, *x: f(j, i, *x), [m.swapped() for m in leaves], shape[::-1])
    before, n, one_sum = self.wait, divisor(shape[1], 16, 8, 4), out.shape[0] == 1
    lanes, total = self.register(n, n), self.register(1, 0)
    def clear():
      with self.loop(n) as lane: self.store(lanes, 0, lane, 0.0)
    def finish(i):
      self.store(total, 0, 0, self.load(out, i, 0))
      with self.loop(n) as lane:
        self.store(total, 0, 0, self.load(total, 0, 0) + self.load(lanes, 0, lane))
      self.store(out, i, 0, self.load(total, 0, 0))
    if one_sum: clear()
    with self.loop(shape[0]) as i:
      if not one_sum: clear()
      with self.loop(shape[1] // n) as m:
        with self.loop(n) as lane:
          j = m * n + lane
          self.store(lanes, 0, lane, self.load(lanes, 0, lane) + f(i, j, *self.elements(leaves, i, j, before)))
      if not one_sum: finish(i)
    if one_sum: finish(0)
  def gather_shared(self, out, f, leaves, shape):
    """gather by all threads: several of them add the terms of each sum, and then one adds their results."""
    if out.shape[1] > 1:
      leaves = [m.swapped() for m in leaves]
      return self.gather_shared(out.swapped(), lambda i, j, *x: f(j, i, *x), leaves, shape[::-1])
    (R, C), one_sum, total = shape, out.shape[0] == 1, self.register(1, 0)
    sums, terms = (1, R * C) if one_sum else (R, C)
    many = divisor(terms, max(1, self.threads // sums))
    parts = self.without_grad((sums, many)) if many > 1 else out
    if self.quiet: return
    self.order([*leaves, out], [parts])
    before = self.wait
    with self.shared(sums * many) as n:
      s, part = (n % sums, n // sums) if leaves[0].tall else (n // many, n % many)
      self.store(total, 0, 0, 0.0 if many > 1 else self.load(out, s, 0))
      with self.loop(terms // many) as m:
        term = m * many + part
        i, j = (term // C, term % C) if one_sum else (s, term)
        self.store(total, 0, 0, self.load(total, 0, 0) + f(i, j, *self.elements(leaves, i, j, before)))
      self.store(parts, s, part, self.load(total, 0, 0))
    if many == 1: return
    self.order([parts], [out])
    with self.shared(sums) as s:
      self.store(total, 0, 0, self.load(out, s, 0))
      with self.loop(many) as part:
        self.store(total, 0, 0, self.load(total, 0, 0) + self.load(parts, s, part))
      self.store(out, s, 0, self.load(total, 0, 0))
  def register(self, n, slot):
    return Stored(self, UOp.placeholder((n,), dtypes.float, slot, addrspace=AddrSpace.REG), (1, n), 0, n)
  def copied(self, m):
    """A copy of m whose rows lie along memory.  No gradient belongs to it."""
    def make():
      copy = self.without_grad(m.shape)
      self.each(copy, m.f, m.leaves)
      return copy
    return self.memo(("copied", m), make)
  def product(self, out, x, y, start=None, scale=1.0, add=False, large=False):
    """out = start + scale x y, or out += scale x y.  Tiles of out stay in registers; the inner loop runs along the
    memory of out and of y.  large: factors that do not fit the caches are read in blocks, and a panel of y is copied to
    where its rows lie together."""
    if out.tall:
      out, x, y, start = out.transpose(), y.transpose(), x.transpose(), start and start.flip()
    (R, C), K = out.shape, x.shape[1]
    if R == 1 and y.tall and start is None:                # a row times columns that lie along memory: dot products
      if not add: self.each(out, lambda i, j: 0.0, ())
      return self.gather(out.transpose(), lambda i, j, a, b: a * b * scale, (y.transpose(), x), (C, K))
    if y.cols != 1 and C > 1: y = self.copied(y)
    (height, width), depth = tile_shape(R, C, self.vectors), K
    if large and K > 256: depth = max(n for n in range(1, 257) if K % n == 0)
    panel = self.new((depth, width)) if large and R > 16 else None
    if self.quiet: return
    self.flops += 2 * R * C * K * self.turns
    tile = [self.register(width, 100 * (n + 1) + width) for n in range(height)]
    def first(block, i, j, before):
      """Where the sums of an element start."""
      if start: return start.f(i, j, *self.elements(start.leaves, i, j, before))
      if add: return self.load(out, i, j)
      return block.eq(0).where(0.0, self.load(out, i, j)) if depth < K else 0.0
    def of_tile(block, r, column, part, before):
      """One tile, whose columns are those that column(lane) numbers."""
      # rows apart: rows side by side become vectors, which compile slowly
      rows = [r * height + n if large else n * (R // height) + r for n in range(height)]
      with self.loop(width) as lane:
        for i, t in zip(rows, tile):
          self.store(t, 0, lane, first(block, i, column(lane), before) if scale == 1.0 else 0.0)
      with self.loop(depth) as n:
        with self.loop(width) as lane:
          for i, t in zip(rows, tile):
            term = self.load(x, i, block * depth + n, before) * self.load(part, n, lane, before)
            self.store(t, 0, lane, self.load(t, 0, lane) + term)
      with self.loop(width) as lane:
        j = column(lane)
        for i, t in zip(rows, tile):
          total = self.load(t, 0, lane)
          self.store(out, i, j, total if scale == 1.0 else total * scale + first(block, i, j, before))
    if self.threads > 1:                                   # threads side by side take columns side by side
      self.order([x, y, *(start.leaves if start else ())], [out])
      before, apart = self.wait, C // width
      with self.shared(R // height * apart) as n:
        part = y.view((K, width), n % apart * y.cols, y.rows, y.cols * apart)
        of_tile(0, n // apart, lambda lane: lane * apart + n % apart, part, before)
      return
    with self.loop(K // depth) as block:
      with self.loop(C // width) as column:
        part = y.block(block * depth, depth, column * width, width)
        if panel: self.each(panel, part.f, (part,))
        part, before = panel or part, self.wait
        with self.loop(R // height) as r: of_tile(block, r, lambda lane: column * width + lane, part, before)

  # statements
  def record(self, adjoint):
    if self.tape is not None: self.tape.append(adjoint)
  def spread(self, e, g):
    """The adjoint of an expression whose gradient is g: it adds to the gradient of each of its leaves."""
    symbols = [symbol(f"x{n}") for n in range(len(e.leaves))]
    slopes = compute_gradient(e.f(ROW, COLUMN, *symbols), symbol("g"), set(symbols)) if e.leaves else {}
    def value_of(slope):
      return lambda i, j, *values: substituted(slope, dict(zip((ROW, COLUMN, symbol("g"), *symbols), (i, j, *values))))
    wanted = [(leaf, leaf.grad, value_of(slopes[x])) for leaf, x in zip(e.leaves, symbols)
              if leaf.grad is not None and x in slopes]
    equal = [(grad, value) for leaf, grad, value in wanted if leaf.shape == e.shape]
    if equal:
      self.add([grad for grad, _ in equal], [value for _, value in equal], (g, *e.leaves), e.shape)
    for leaf, grad, value in wanted:
      if leaf.shape != e.shape:
        self.gather(grad, value, (g, *e.leaves), e.shape)
  def assign(self, out, e):
    if out.buffer is not None:
      if isinstance(e, Product):
        self.product(out, e.x, e.y, e.start, e.scale)
      else: self.each(out, e.f, e.leaves)
    def adjoint():
      if not isinstance(e, Product): return self.spread(e, out.grad)
      if e.x.grad:
        self.product(e.x.grad, out.grad, e.y.transpose(), scale=e.scale, add=True)
      if e.y.grad:
        self.product(e.y.grad, e.x.transpose(), out.grad, scale=e.scale, add=True)
      if e.start: self.spread(e.start, out.grad)
    self.record(adjoint)
    return out
  def sigmoid(self, e):
    """It is stored, since its slope is made of it: exp is the dearest of the elementwise operations."""
    if isinstance(e, Product): e = e.stored()
    s = self.new(e.shape, e.leaves)
    self.each(s, lambda i, j, *x: 1 / (1 + (e.f(i, j, *x) * (-1 / math.log(2))).exp2()), e.leaves)
    def adjoint():
      self.each(s.grad, lambda i, j, y, g: y * (1 - y) * g, (s, s.grad))
      self.spread(e, s.grad)
    self.record(adjoint)
    return s
  def sum(self, e, axes):
    """The sum over rows (axis 0), columns (axis 1) or both, whose length becomes 1."""
    if isinstance(e, Product): e = e.stored()
    out = self.new((1 if 0 in axes else e.shape[0], 1 if 1 in axes else e.shape[1]))
    self.fill(out.buffer, out.start, out.shape[0] * out.shape[1])
    self.gather(out, e.f, e.leaves, e.shape)
    self.record(lambda: self.spread(e, out.grad))
    return out
  def backward(self, body):
    """body, recorded, and then its adjoints in reverse; the gradients of all that it makes start at zero."""
    tape:list[Callable] = []
    outer, first, self.tape = self.tape, self.used_grads, tape
    self.memos.append({})
    body()
    if self.used_grads > first and self.grads is not None:
      self.fill(self.grads, self.grads_origin + first, self.used_grads - first)
    self.tape = outer
    for adjoint in reversed(tape): adjoint()
    self.memos.pop()
  def scan(self, size, body, carry):
    """body(t, now, then) for every t: it reads the matrices `now` (at first: carry) and assigns `then`.  Returns t ->
    the matrices after t turns.  Under a tape all that a turn computes is kept for the adjoint.  A loop without a carry
    keeps nothing: its adjoint runs each turn again."""
    stacks = []                                            # for each carry, all its states one behind the other
    for m in carry:
      R, C = m.shape[::-1] if m.tall else m.shape
      stacks.append((self.new(((size + 1) * R, C)), R, m.tall))
    def at(t):
      blocks = [(stack.block(t * R, R), tall) for stack, R, tall in stacks]
      return [block.transpose() if tall else block for block, tall in blocks]
    for s, m in zip(at(0), carry): self.assign(s, m)
    base, tape, keeping, grads = self.origin + self.used, self.tape, self.keeping, self.used_grads
    recorded = tape is not None or keeping
    kept = recorded and len(carry) > 0
    def turn(t, stride, quiet):
      """One turn, with its scratch at base + t * stride.  Returns how much scratch it needs."""
      frame = self.origin, self.used, self.quiet, self.keeping
      self.origin, self.used, self.quiet, self.keeping = base + t * stride, 0, quiet or self.quiet, kept or self.keeping
      body(t, at(t), at(t + 1))
      (self.origin, self.used, self.quiet, self.keeping), needed = frame, self.used
      return needed
    def forward(t, stride, quiet):
      self.memos.append({})
      local, needed = self.used_local, turn(t, stride, quiet)
      self.used_local = local
      self.memos.pop()
      return needed
    self.tape, self.keeping = [] if recorded else None, recorded
    needed = forward(UOp.const(0), 0, True)                # quiet: it measures the scratch of a turn
    stride, self.used_grads, self.tape = needed if kept else 0, grads, None
    self.used += size * stride or needed
    if kept or not recorded:
      with self.loop(size) as t: forward(t, stride, False)
    self.tape, self.keeping = tape, keeping
    def adjoint():
      with self.loop(size) as t:
        self.backward(lambda: turn(size - 1 - t, stride, kept))
    self.record(adjoint)
    return at
  def filled(self, shape, x):
    return Matrix(self, shape, (), lambda i, j: x).stored()

# *** compiled kernels as Tensors ***

class Compiled(NamedTuple):
  args:list[str]          # names of the arguments that the program takes, in order
  size:dict[str, int]     # how many numbers each holds
  program:UOp

class LoopOrder:
  """tinygrad's CFGContext for kernels whose nests wait for the one before: a loop comes after the one that ends before
  it, or after the start of the loop around it.  The original walks the whole graph once for every loop."""
  def __init__(self, sink:UOp):
    self.edges:dict[UOp, UOp] = {}
    loops, before = list[UOp](), list[UOp|None]([None])  # the loops that are open; what came before, in each of them
    for u in sink.toposort():
      if u.op is Ops.RANGE:
        if (previous := before[-1]) is not None: self.edges[u] = previous
        loops.append(u)
        before.append(u)
      if u.op is Ops.END:
        assert loops.pop() is u.src[1]
        before[-2:] = [u]

# tinygrad's barriers order LOCAL memory.  The scratch memory of a work-group lies in GLOBAL memory as well.
BARRIERS = {"barrier(CLK_LOCAL_MEM_FENCE);": "barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);",
            "threadgroup_barrier(mem_flags::mem_threadgroup);":
            "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);",
            "workgroupBarrier();": "storageBarrier(); workgroupBarrier();"}

def renderer_of(device:str) -> Any:
  renderer:Any = copy.copy(Device[device].renderer)
  renderer.barrier = BARRIERS.get(renderer.barrier, renderer.barrier)
  return renderer

NO_BARRIERS = PatternMatcher([])
TO_SOURCE = PatternMatcher(codegen.pm_to_program.patterns[:-1])            # tinygrad's last pattern calls the compiler

@disable_gc()
def compiled(args:list[str], size:dict[str, int], sink:UOp, device:str) -> Compiled:
  """A kernel as source code; tinygrad compiles the code with the other kernels of a step, in its worker processes.  The
  thousands of operations are not kept, since every pass over the graph would visit them.  Three passes cost the
  square of a kernel's length and are not needed: the search for barriers around LOCAL memory, the search for the order
  of loops, and the comparison of operations that differ only in their waits.

  clang 14 and 15 need minutes for a long kernel whose loop counters have 32 bits: wherever the counters become
  addresses, LLVM's ScalarEvolution proves anew, through all loops, that they do not overflow.  Counters of 64 bits need
  no proof, but their kernels are a little slower, so newer compilers keep 32 bits."""
  replaced = {"pm_implicit_barriers": NO_BARRIERS, "CFGContext": LoopOrder, "pm_to_program": TO_SOURCE}
  original, renderer = {name: getattr(codegen, name) for name in replaced}, renderer_of(device)
  for name, x in replaced.items(): setattr(codegen, name, x)
  try:
    with Context(TUPLE_ORDER=0): program = do_to_program(sink, renderer)
  finally:
    for name, x in original.items(): setattr(codegen, name, x)
  # only the arguments that it uses are passed
  place = {slot: n for n, slot in enumerate(program.arg.globals)}
  places = {n: tuple(place[slot] for slot in getattr(program.arg, n)) for n in ("globals", "outs", "ins")}
  params = []
  for u in program.src[1].src:
    if u.op is Ops.PARAM: params.append(u.replace(arg=replace(u.arg, slot=place.get(u.arg.slot, u.arg.slot))))
  used = [args[slot] for slot in place]
  for n, name in enumerate(used):
    if name in SCRATCH: params[n] = params[n].replace(arg=replace(params[n].arg, name=name))
  light = [UOp(Ops.SINK, arg=program.src[0].arg), program.src[1].replace(src=tuple(params)), *program.src[2:]]
  if vectors(device).long_counters:
    def lengthened(u): return u.replace(arg=re.sub(r"\bint (?=(alu|Lidx)\d)", "long ", u.arg))
    light = [lengthened(u) if u.op is Ops.SOURCE else u for u in light]
  return Compiled(used, size, program.replace(arg=replace(program.arg, **places), src=tuple(light)))

def run_kernel(kernel:Compiled, inputs:dict[str, Tensor], device:str, grad_fxn:Callable|None=None) -> dict[str, Tensor]:
  """Every argument after the call; those without an input are new."""
  buffers = []
  for n in kernel.args:
    buffers.append(inputs[n] if n in inputs else Tensor.empty(kernel.size[n], dtype=dtypes.float, device=device))
  done = kernel.program.call(*[t.uop for t in buffers], grad_fxn=grad_fxn)
  return {n: Tensor(t.uop.after(done)) for n, t in zip(kernel.args, buffers)}

# *** dense products ***

@functools.cache
def matmul_kernel(G:int, R:int, C:int, K:int, xt:bool, yt:bool, cores:int, device:str) -> Compiled:
  """G products (R,K) (K,C); xt, yt: the factor is stored transposed.  Cores share the products, or else their rows."""
  groups = divisor(G, cores)
  bands = divisor(R, cores // groups)
  parts, rows = groups * bands, R // bands
  def build(scratch):
    size = dict(out=G * R * C, x=G * R * K, y=G * K * C, values=max(parts * to_multiple(scratch, 16), 1))
    out, x, y, values = [UOp.placeholder((n,), dtypes.float, slot=slot) for slot, n in enumerate(size.values())]
    kernel = Kernel(values, None, scratch < 0, vectors(device))
    with kernel.parts(parts) as part:
      with kernel.loop(G // groups) as turn:
        g, band = part // bands * (G // groups) + turn, part % bands * rows
        def matrix(buffer, i, j, transposed):
          if transposed: return matrix(buffer, j, i, False).transpose()
          return Stored(kernel, buffer, (i, j), g * (i * j), j)
        share = matrix(x, R, K, xt).block(band, rows)
        kernel.product(matrix(out, R, C, False).block(band, rows), share, matrix(y, K, C, yt), large=True)
    return size, kernel.code(f"matmul_{G}_{R}_{C}_{K}", sum(size.values())), kernel.used
  size, sink, _ = build(build(-1)[2])
  return compiled(list(size), size, sink, device)

def transposed(x, yes):
  return x.transpose(-1, -2) if yes else x

def matmul(x:Tensor, y:Tensor, xt:bool=False, yt:bool=False) -> Tensor:
  """x @ y over the last two axes, each first transposed if asked (xt, yt).  Leading axes broadcast as in numpy;
  ValueError where they do not, or where columns and rows differ.  The result is float32.

  On a CPU it uses the register tile of Kernel.product; elsewhere, and for sizes that no tile divides, a stock
  product."""
  if min(x.ndim, y.ndim) < 2: raise ValueError(f"matmul takes two axes or more, not shapes {x.shape} and {y.shape}")
  R, K = reversed(sizes(x)[-2:]) if xt else sizes(x)[-2:]
  K2, C = reversed(sizes(y)[-2:]) if yt else sizes(y)[-2:]
  if K != K2: raise ValueError(f"matmul: {K} columns do not meet {K2} rows")
  if y.ndim == 2 and not xt:
    lead = x.shape[:-1]
    x = x.reshape(-1, K)
    R = sizes(x)[0]
  else:
    try: axes = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    except ValueError: raise ValueError(f"matmul: leading axes of {x.shape} and {y.shape} do not broadcast") from None
    x, y = [z if z.shape[:-2] == axes else z.expand(*axes, *z.shape[-2:]) for z in (x, y)]
    lead = (*axes, R)
  if on_cpu(x.device) or x.dtype != y.dtype:
    x, y = x.cast(dtypes.float), y.cast(dtypes.float)
  tiled = on_cpu(x.device) and (C < 8 or tile_shape(R, C, vectors(cast(str, x.device)))[1] >= 4)
  if not tiled:
    return transposed(x, xt).dot(transposed(y, yt), dtype=dtypes.float).reshape(*lead, C)
  G, device = math.prod(sizes(x)[:-2]), cast(str, x.device)
  def backward(g, call):
    shapes = (K, R) if xt else (R, K), (C, K) if yt else (K, C), (R, C)
    a, b, g = [Tensor(z).reshape(G, *shape) for z, shape in zip((*call.src[2:4], g), shapes)]          # out, x, y
    da = matmul(b, g, yt, True) if xt else matmul(g, b, False, not yt)
    db = matmul(g, a, True, xt) if yt else matmul(a, g, not xt, False)
    return (None, da.reshape(-1).uop, db.reshape(-1).uop, *[None] * (len(call.src) - 4))
  kernel = matmul_kernel(G, R, C, K, xt, yt, NUM_CPU_THREADS.value, device)
  flat = dict(x=x.reshape(-1).contiguous(), y=y.reshape(-1).contiguous())
  return run_kernel(kernel, flat, device, backward)["out"].reshape(*lead, C)

# *** the recurrence in one kernel ***

class KernelShapes(NamedTuple):
  """What a kernel is compiled for."""
  heads:int                                 # B*H
  first_heads:int                           # heads of the first state: H where the batch shares it, or B*H
  R_heads:int                               # heads of the memory that forgetting leads to: H, or 0 where that is zero
  parts:int                                 # cores or work-groups that share the heads, see parts_of
  chunks:int                                # N
  chunk:int                                 # b
  halo:bool                                 # k and v begin with the window - 1 tokens before the first
  d:int
  dv:int
  D:int
  every:int                                 # tokens to a Muon step
  weights:tuple[tuple[str, int, int], ...]  # name, rows, columns

def row_shapes(parts:dict[str, Tensor]) -> tuple[tuple[str, int, int], ...]:
  """The names, rows and columns of matrices, as in KernelShapes."""
  return tuple((n, *cast(tuple[int, int], sizes(w)[-2:])) for n, w in parts.items())

class Layout:
  """Where the matrices M (o,i) of one head lie in a row of numbers, and behind them those of S.  Each lies along its
  longer side, so that Newton-Schulz and the products with it run along memory."""
  def __init__(self, cfg:Rule, weights:tuple[tuple[str, int, int], ...]):
    sizes = [o * i for _, o, i in weights]
    self.weights, self.M_size, self.size = weights, sum(sizes), sum(sizes) * (1 + cfg.momentum)
    self.starts = {name: sum(sizes[:n]) for n, (name, _, _) in enumerate(weights)}
  def views(self, kernel:Kernel, buffer:UOp|None, start, grads:UOp|None=None, grad_start:Any=0) -> dict[str, Stored]:
    """The matrices of a row that begins at `start` of a buffer, and their gradients in `grads`."""
    row = (1, self.M_size)
    grad = None if grads is None else Stored(kernel, grads, row, grad_start, self.M_size)
    return self.parts(Stored(kernel, buffer, row, start, self.M_size, 1, grad))
  def parts(self, row:Stored) -> dict[str, Stored]:
    """The matrices in a row."""
    def part(name, o, i): return row.view((o, i), self.starts[name], *((1, o) if i >= o else (i, 1)))
    return {w[0]: part(*w) for w in self.weights}
  def pack(self, parts:list[Weights]) -> Tensor:
    """Dicts of (...,o,i) -> (heads, numbers); columns are padded with zeros to the number that the layout has for
    them.  An empty dict, of a rule without momentum, has no numbers."""
    rows = []
    for part, (name, o, i) in itertools.product(filter(None, parts), self.weights):
      w = part[name].reshape(-1, *sizes(part[name])[-2:])
      w = w.pad((None, None, (0, i - sizes(w)[-1])))
      rows.append((w.transpose(-1, -2) if i >= o else w).reshape(-1, o * i))
    return Tensor.cat(*rows, dim=-1)
  def unpack(self, rows:Tensor, shapes:dict[str, tuple]) -> Weights:
    """(heads, numbers) -> matrices of the given shapes."""
    out = {}
    for name, o, i in self.weights:
      w = rows[:, self.starts[name]:self.starts[name] + o * i]
      w = w.reshape(-1, i, o).transpose(-1, -2) if i >= o else w.reshape(-1, o, i)
      out[name] = w[..., :shapes[name][-1]].reshape(shapes[name])
    return out
  def states(self, rows:Tensor, shapes:dict[str, tuple]) -> tuple[Weights, Weights]:
    """M and S (empty without momentum) in rows that begin with them."""
    M = self.unpack(rows, shapes)
    return M, self.unpack(rows[:, self.M_size:], shapes) if self.size > self.M_size else {}

class ChunkInputs(NamedTuple):
  """What one chunk of one head reads, and where its outputs go."""
  factors:dict[str, tuple[Any, Any]]   # of rule.gradients: u (E,o), x (E,i)
  r:Any                                # phi(q) (rows,D)
  q:Any                                # (rows,d)
  y:Stored                             # (b,dv), written here
  band:Stored                          # (b,E): the window gates of each token over the chunk with its halo
  alpha:Stored                         # (b,1)
  theta:Stored                         # (b,1), not used without momentum
  eta:Stored                           # (b,1)

class ChunkStates(NamedTuple):
  """M and S before and after a chunk, as differences from R; the matrices after it are written here."""
  R:dict[str, Stored]
  M:dict[str, Stored]
  S:dict[str, Stored]
  new_M:dict[str, Stored]
  new_S:dict[str, Stored]

def next_states(kernel:Kernel, cfg:Rule, factors:dict, states:ChunkStates, kept_M:Any, of_M:tuple, of_S:tuple):
  """The states after a chunk of linear steps.  of_M: the weights of the gradients (1,E) and of S (1,1) in the next M;
  of_S: those in the next S."""
  for name, (u, x) in factors.items():
    def weighted(weights):
      return (weights.transpose() * u).stored().transpose() @ x
    state = kept_M * states.M[name]
    if cfg.momentum:
      state = state + of_M[1] * states.S[name]
      kernel.assign(states.new_S[name], weighted(of_S[0]) + of_S[1] * states.S[name])
    kernel.assign(states.new_M[name], weighted(of_M[0]) + state)

def linear_chunk(kernel:Kernel, cfg:Rule, inputs:ChunkInputs, states:ChunkStates) -> None:
  """A chunk of linear steps, in the dual form: the weights C_t and P_t of M_t and S_t over the chunk's gradients
  (column E: over S), one row a token; then the outputs and the next state as products (Eq. 15-16)."""
  b, (R, M, S, *_) = inputs.alpha.shape[0], states
  E, W = next(iter(inputs.factors.values()))[0].shape[0], inputs.band.shape[1]
  carry = [kernel.filled((1, W), 0.0), kernel.filled((1, 1), 1.0)]
  if cfg.momentum:
    at_S = Matrix(kernel, (1, W), (), lambda i, j: j.eq(E).where(constant(1.0), constant(0.0)))
    carry.append(at_S.stored())
  def token(t, now, then):
    C, kept_M = now[0], now[1]
    P = inputs.band.block(t, 1)
    alpha, eta = inputs.alpha.block(t, 1), inputs.eta.block(t, 1)
    if cfg.momentum:
      P = kernel.assign(then[2], inputs.theta.block(t, 1) * now[2] + P)
    kernel.assign(then[0], alpha * C - eta * P)                            # M_t = alpha_t M_{t-1} - eta_t S_t
    kernel.assign(then[1], alpha * kept_M)
  rows = kernel.scan(b, token, carry)
  (C, kept_M), last = [m.block(0, b) for m in rows(1)[:2]], rows(b)        # of every token; of the last one
  def read(name, z):
    u, x = inputs.factors[name]
    state = kept_M * (z @ M[name].transpose())
    if R: state = z @ R[name].transpose() + state
    if cfg.momentum:
      state = state + C.block(0, b, E, 1) * (z @ S[name].transpose())
    return (C.block(0, b, 0, E) * (z @ x.transpose())) @ u + state
  kernel.assign(inputs.y, apply(cfg, read, inputs.r, inputs.q))
  of_M, of_S = [(m.block(0, 1, 0, E), m.block(0, 1, E, 1)) for m in (last[0], last[-1])]
  next_states(kernel, cfg, inputs.factors, states, last[1], of_M, of_S)

def stepwise_chunk(kernel:Kernel, cfg:Rule, every:int, D:int, inputs:ChunkInputs, states:ChunkStates) -> None:
  """A chunk of steps that are not linear in S, such as Newton-Schulz: S and M are written out at every step.

  A group is the `every` tokens up to a step.  Between steps M only fades.  So the tokens of a group before its step,
  and the last token of the group before, read the same M; inputs.r and inputs.q are therefore one row of zeros, the b
  tokens, and every - 1 rows of zeros."""
  (R, M, S, new_M, new_S), b = states, inputs.alpha.shape[0]
  # over a group: the weights of its gradients in S, and what is left of M and of S
  weights, kept_M, kept_S = inputs.band, inputs.alpha, inputs.theta
  if every > 1:
    def token(t, now, then):
      first = (t % every).eq(0)
      alpha = inputs.alpha.block(t, 1)
      kernel.assign(then[0], alpha * now[0].map(lambda x: first.where(1.0, x)))
      if not cfg.momentum: return
      theta = inputs.theta.block(t, 1)
      kernel.assign(then[1], theta * now[1].map(lambda x: first.where(1.0, x)))
      kernel.assign(then[2], theta * now[2].map(lambda x: first.where(0.0, x)) + inputs.band.block(t, 1))
    widths = (1, 1, inputs.band.shape[1]) if cfg.momentum else (1,)
    zeros = [kernel.filled((1, n), 0.0) for n in widths]
    of_token = [m.block(0, b) for m in kernel.scan(b, token, zeros)(1)]
    kept_M = of_token[0]
    if cfg.momentum: kept_S, weights = of_token[1:]
  lay, window = Layout(cfg, tuple((n, m.shape[0], m.shape[1]) for n, m in M.items())), every + cfg.window - 1
  alike = [[n for n, _, _ in same] for _, same in itertools.groupby(lay.weights, lambda w: w[1:])]       # in shape
  def row(part): return next(iter(part.values())).view((1, lay.M_size), 0, lay.M_size, 1)
  def step(s, u, n, *_):
    """U of the n-th of the matrices that lie one behind the other from s on."""
    s, u = [m.view(m.shape, n * (m.shape[0] * m.shape[1]), m.rows, m.cols) for m in (s, u)]
    kernel.assign(u, STEPS[cfg.optimizer].direction(s, cfg))
  def group(g, now, then):
    t = g * every + every - 1                              # the token that takes the step
    S_row = then[1] if cfg.momentum else kernel.new((1, lay.M_size))
    U_row = kernel.new((1, lay.M_size))
    S, U = lay.parts(S_row), lay.parts(U_row)
    for n, (u, x) in inputs.factors.items():
      w = weights.block(t, 1, g * every, window).transpose()
      s = (w * u.block(g * every, window)).stored().transpose() @ x.block(g * every, window)
      kernel.assign(S[n], s + kept_S.block(t, 1) * lay.parts(now[1])[n] if cfg.momentum else s)
    if STEPS[cfg.optimizer].padded:
      for n, *rest in alike:
        if not rest: step(S[n], U[n], 0)
        else: kernel.scan(1 + len(rest), functools.partial(step, S[n], U[n]), [kernel.filled((1, 1), 0.0)])
    else:                                                  # the step sees its matrices without the columns beside them
      kernel.each(U_row, lambda i, j: 0.0, ())
      for n, (_, x) in inputs.factors.items():
        s, u = [m.block(0, m.shape[0], 0, x.shape[1] if n == "W1" else D) for m in (S[n], U[n])]
        kernel.assign(u, STEPS[cfg.optimizer].direction(s, cfg))
    kernel.assign(then[0], kept_M.block(t, 1) * now[0] - inputs.eta.block(t, 1) * U_row)
  rows = kernel.scan(b // every, group, [row(M), *([row(S)] if cfg.momentum else [])])
  fading, out = kernel.filled((b + every, 1), 1.0), kernel.new((b + every, inputs.y.shape[1]))
  if every > 1:                                            # a token that takes a step reads what the step has left
    def at_step(i, j, kept):
      return (i % every).eq(every - 1).where(1.0, kept)
    kernel.assign(fading.block(1, b), Matrix(kernel, (b, 1), (kept_M,), at_step))
  def reads(g, *_):
    if every == 1: g = g + 1
    def lines(m): return m.block(g * every, every)
    now = lay.parts(rows(g)[0])
    def read(name, z):
      y = lines(fading) * (z @ now[name].transpose())
      return z @ R[name].transpose() + y if R else y
    kernel.assign(lines(out), apply(cfg, read, lines(inputs.r), lines(inputs.q)))
  kernel.scan(b // every + (every > 1), reads, [])
  kernel.assign(inputs.y, out.block(1, b))
  for part, last in zip((new_M, new_S), rows(b // every)): kernel.assign(row(part), last)

class Recurrence:
  """The kernel over all heads and chunks.  Forward it leaves in `states` the base of the first chunk (row 0) and the M
  and S that every chunk starts with (rows 1 to N), and the last ones (row N+1).  Backward it goes from the last chunk
  to the first and computes each anew from the state it started with.  dstates: the states have a gradient of their own.

  scratch: numbers of scratch memory of a part, for values and gradients, and of LOCAL memory; without it the kernel
  only counts how many are needed."""
  name, y = "memory", ["y"]
  def __init__(self, cfg:Rule, s:KernelShapes, device:str, backward:bool, dstates:bool, scratch:tuple[int, ...]=()):
    self.cfg, self.s, self.is_backward, self.dstates = cfg, s, backward, dstates
    self.linear, self.monomials = STEPS[cfg.optimizer].linear, FEATURES[cfg.features].coefficients
    self.lay = Layout(cfg, s.weights)
    self.row_size = self.lay.size
    per_head = self.streams()
    M_size, state_size = self.lay.M_size, self.lay.M_size + self.lay.size
    size = {n: x * s.heads for n, x in per_head.items()} | dict(states=s.heads * (s.chunks + 2) * self.row_size)
    size |= dict(first=s.first_heads * state_size, toward=s.R_heads * M_size, scales=s.D, places=cfg.degree * s.D)
    ins = ["first", "toward", *[n for n in per_head if n not in self.y], "scales", "places"]
    poly = self.monomials and len(self.y) > 0
    used = {"toward": s.R_heads > 0, "theta": cfg.momentum, "scales": poly, "places": poly}
    self.ins = [n for n in ins if used.get(n, True)]
    self.outs = ["d" + n for n in self.ins if n != "places"]
    size |= {"d" + n: x for n, x in size.items()}
    size |= dict(dfirst=s.heads * state_size, dscales=s.heads * s.D, dtoward=s.heads * M_size)
    # A part's scratch memory begins at a multiple of 64 bytes, which the vector loads of a kernel rely on.
    stride = [to_multiple(x, 16) for x in scratch[:2]]
    size |= dict.fromkeys(SCRATCH, 1) | {n: max(1, s.parts * x) for n, x in zip(SCRATCH, stride)}
    if backward:
      dy = ["d" + n for n in self.y] + (["dstates"] if dstates else [])
      self.args = [*self.outs, "values", "grads", "states", *dy, *self.ins[1:]]
    else: self.args = [*self.y, "states", "values", *self.ins]
    self.size, self.buffers = size, {}
    for slot, n in enumerate(self.args):
      self.buffers[n] = UOp.placeholder((size[n],), dtypes.int if n == "places" else dtypes.float, slot=slot)
    scratch_memory = self.buffers["values"], self.buffers.get("grads")
    kernel = self.kernel = Kernel(*scratch_memory, not scratch, vectors(device), *scratch[2:])
    with kernel.parts(s.parts) as part:
      if scratch and not on_cpu(device):                   # on a CPU every part has its own pointers, see parallel_call
        kernel.origin, kernel.grads_origin = part * stride[0], part * stride[1]
      with kernel.loop(s.heads // s.parts) as turn: self.one_head(part * (s.heads // s.parts) + turn)

  def streams(self) -> dict[str, int]:
    """Inputs and outputs that every token has, and how many numbers a head has of them."""
    s, T = self.s, self.s.chunks * self.s.chunk
    T_keys = T + self.cfg.window - 1 if s.halo else T
    self.E = to_multiple(s.chunk + self.cfg.window - 1, 8)                   # multiples tile well
    return dict(y=T * s.dv, q=T * s.d, k=T_keys * s.d, v=T_keys * s.dv, alpha=T, theta=T, eta=T,
                gamma=T * self.cfg.window)

  def code(self):
    name = self.name + "_backward" if self.is_backward else self.name
    return self.kernel.code(name, sum(self.size[n] for n in self.args))

  def one_head(self, g):
    kernel, cfg, s, buffers, lay = self.kernel, self.cfg, self.s, self.buffers, self.lay
    N, M_size = s.chunks, lay.M_size
    padded = self.padded_inputs()
    R = {}
    if s.R_heads:
      R = lay.views(kernel, buffers["toward"], g % s.R_heads * M_size, buffers.get("dtoward"), g * M_size)
    first = (g % s.first_heads if s.first_heads != s.heads else g) * (M_size + lay.size)
    def row(n): return (g * (N + 2) + n) * self.row_size                     # where a row of `states` starts
    def line(name, start, n):
      return Stored(kernel, buffers[name], (1, n), start, n)
    def copy(out, x): kernel.each(out, x.f, (x,))
    def state(n, grads=None, grad_start:Any=0) -> tuple[dict, dict]:
      M = lay.views(kernel, buffers["states"], row(n), grads, grad_start)
      if not cfg.momentum: return M, {}
      return M, lay.views(kernel, buffers["states"], row(n) + M_size, grads, grad_start + M_size)
    if not self.is_backward:
      copy(line("states", row(0), M_size), line("first", first, M_size))
      copy(line("states", row(0) + self.row_size, lay.size), line("first", first + M_size, lay.size))
      with kernel.loop(N) as n:
        kernel.memos.append({})
        base, _ = state(n.eq(0).where(0, n + 1))
        self.chunk(g, n, padded, base, ChunkStates(R, *state(n + 1), *state(n + 2)))
      return
    grads = buffers["grads"]
    ring = kernel.grads_origin + kernel.used_grads         # gradients of two states by turns, and of the first base
    kernel.used_grads += 3 * lay.size
    def slot(n): return ring + n * lay.size
    kernel.fill(grads, ring, 3 * lay.size)
    for name in self.outs[1:]:
      per_head = self.size[name] // s.heads
      kernel.fill(buffers[name], g * per_head, per_head)
    def add_dstates(to, n, size):
      if not self.dstates: return
      x, out = line("dstates", row(n), size), line("grads", slot(to), size)
      kernel.add([out], [x.f], (x,), out.shape)
    add_dstates(N % 2, N + 1, lay.size)
    add_dstates(2, 0, M_size)
    with kernel.loop(N) as turn:
      n = N - 1 - turn
      kernel.fill(grads, slot(n % 2), lay.size)
      add_dstates(n % 2, n + 1, lay.size)
      base, _ = state(n.eq(0).where(0, n + 1), grads, slot(n.eq(0).where(2, n % 2)))
      def body():
        before = state(n + 1, grads, slot(n % 2))
        new_M = lay.views(kernel, None, 0, grads, slot((n + 1) % 2))         # only their gradients are wanted
        new_S = lay.views(kernel, None, M_size, grads, slot((n + 1) % 2) + M_size) if cfg.momentum else {}
        self.chunk(g, n, padded, base, ChunkStates(R, *before, new_M, new_S))
      kernel.backward(body)
    start = g * (M_size + lay.size)
    copy(line("dfirst", start, M_size), line("grads", slot(2), M_size))
    copy(line("dfirst", start + M_size, lay.size), line("grads", slot(0), lay.size))

  def padded_inputs(self):
    """Scratch for a chunk's inputs with rows and columns beside them that stay zero; [x, 1] for monomials of x."""
    kernel, s, E = self.kernel, self.s, self.E
    rows, raw = s.chunk if self.linear else s.chunk + s.every, s.d + self.monomials
    band = E + 8 if self.linear and self.cfg.momentum else E
    shapes = {"raw_k": (E, raw), "raw_q": (rows, raw), "v": (E, s.dv), "band": (s.chunk, band)}
    wide = to_multiple(s.D, 16)
    if self.monomials: shapes |= {"x": (E, wide), "r": (rows, wide)}
    padded = {name: kernel.new(shape) for name, shape in shapes.items()}
    kernel.fill(self.buffers["values"], kernel.origin, kernel.used)
    if self.monomials:
      for m in (padded["raw_k"], padded["raw_q"]):
        kernel.each(m.block(0, m.shape[0], s.d, 1), lambda i, j: 1.0, ())
    return padded

  def rows_of(self, name, rows, width, start, row=None):
    """Rows of an input or output, and of its gradient, from number `start` of a buffer on."""
    def at(buffer, grad=None):
      return Stored(self.kernel, buffer, (rows, width), start, width, 1, grad, row)
    grad = at(self.buffers.get("d" + name)) if self.is_backward else None
    return at(self.buffers.get(name), grad)

  def chunk(self, g, n, padded, base, states):
    """Chunk n of head g: reads its inputs, takes the gradients at `base`, and writes its outputs and the next
    states."""
    kernel, cfg, s = self.kernel, self.cfg, self.s
    b, c, d, N = s.chunk, cfg.window, s.d, s.chunks
    reach, front = b + c - 1, 0 if self.linear else 1
    T_keys = N * b + c - 1 if s.halo else N * b
    def stream(name, width):
      return self.rows_of(name, b, width, (g * (N * b) + n * b) * width)
    def keys(name, width):
      def row(i): return n * b + i if s.halo else (n * b + i - (c - 1)).maximum(0)   # before the stream gamma is 0
      return self.rows_of(name, reach, width, g * T_keys * width, row)
    def with_grad(m):
      if not self.is_backward: return m
      return Stored(kernel, m.buffer, m.shape, m.start, m.rows, 1, kernel.new(m.shape).grad)
    pads = {name: with_grad(m) for name, m in padded.items()}
    raw_k, raw_q, v, band = pads["raw_k"], pads["raw_q"], pads["v"], pads["band"]
    k, q = raw_k.block(0, self.E, 0, d), raw_q.block(0, raw_q.shape[0], 0, d)
    kernel.assign(raw_k.block(0, reach, 0, d), keys("k", d))
    kernel.assign(v.block(0, reach), keys("v", s.dv))
    kernel.assign(raw_q.block(front, b, 0, d), stream("q", d))
    if self.monomials:
      x, r = self.monomials_of(g, raw_k, pads["x"]), pads["r"]
      self.monomials_of(g, raw_q.block(front, b), r.block(front, b))
    else: x, r = [FEATURES[cfg.features].map(z).stored() for z in (k, q)]
    alpha, theta, eta = [stream(name, 1) for name in ("alpha", "theta", "eta")]
    gamma = stream("gamma", c)                   # row t of band: token t's gates, that of its oldest key at column t
    kernel.assign(band.view((b, c), 0, band.rows + 1, 1), gamma.view((b, c), c - 1, c, -1))
    if states.R:
      base = {name: (w + states.R[name]).stored() for name, w in base.items()}
    inputs = ChunkInputs(gradients(cfg, base, x, k, v), r, q, stream("y", s.dv), band, alpha, theta, eta)
    if self.linear: linear_chunk(kernel, cfg, inputs, states)
    else: stepwise_chunk(kernel, cfg, s.every, s.D, inputs, states)

  def monomials_of(self, g, x, out):
    """The monomials of the rows x = [raw, 1], as rule.monomials (Eq. 17-18)."""
    kernel, degree, D = self.kernel, self.cfg.degree, self.s.D
    dscales = Stored(kernel, self.buffers["dscales"], (1, D), g * D, D) if self.is_backward else None
    scales = Stored(kernel, self.buffers["scales"], (1, D), 0, D, 1, dscales)
    def place(j, n):
      return self.buffers["places"][j * D + n].load()
    if not kernel.quiet:
      with kernel.loop(x.shape[0]) as i:
        with kernel.loop(D) as n:
          factors = [kernel.load(x, i, place(j, n)) for j in range(degree)]
          kernel.store(out, i, n, product_of([kernel.load(scales, 0, n), *factors]))
    def adjoint():
      if kernel.quiet: return
      with kernel.loop(x.shape[0]) as i:
        with kernel.loop(D) as n:
          before, dout = kernel.wait, kernel.load(out.grad, i, n)
          factors = [kernel.load(x, i, place(j, n), before) for j in range(degree)]
          by_scale = dout * kernel.load(scales, 0, n)
          kernel.store(scales.grad, 0, n, kernel.load(scales.grad, 0, n) + product_of([dout, *factors]))
          for j in range(degree):
            change = product_of([by_scale, *factors[:j], *factors[j + 1:]])
            kernel.store(x.grad, i, place(j, n), kernel.load(x.grad, i, place(j, n)) + change)
    kernel.record(adjoint)
    return out

@functools.cache
def memory_kernel(form:Any, cfg:Rule, s:KernelShapes, device:str, backward:bool, dstates:bool) -> Compiled:
  """Built twice: the first time to see how much scratch memory it needs."""
  shape = cfg, s, device, backward, dstates
  counted = form(*shape).kernel
  built = form(*shape, (counted.used, counted.used_grads, counted.most_local))
  return compiled(built.args, built.size, cast(UOp, built.code()), device)

def run_recurrence(form:Any, cfg:Rule, s:KernelShapes, inputs:dict[str, Tensor], shared:dict[str, int],
                   device:str) -> dict[str, Tensor]:
  """The outputs of a kernel over all heads and chunks, with one for its backward pass.  form: Recurrence or StatePass.
  shared: how many heads share an input."""
  forward = memory_kernel(form, cfg, s, device, False, False)
  def backward(*grads, call=None):
    """tinygrad calls it with (gradient, call) where one output is used, and with (*gradients, call=call) where two
    are: y is flat, `states` a matrix."""
    if call is None: grads, call = grads[:-1], grads[-1]
    sources = {n: Tensor(x) for n, x in zip(forward.args, call.src[1:])}
    saved = {n: sources.get(n, x) for n, x in inputs.items() if n != "first"}
    saved["states"] = Tensor(sources["states"].uop.after(call)).reshape(-1)
    for g in grads: saved["dy" if len(g.shape) == 1 else "dstates"] = Tensor(g).reshape(-1).contiguous()
    for n in form.y:
      zeros = Tensor.zeros(forward.size[n], dtype=dtypes.float, device=device).contiguous()
      saved.setdefault("d" + n, zeros)
    out = run_kernel(memory_kernel(form, cfg, s, device, True, "dstates" in saved), saved, device)
    def gradient(n):
      if n not in inputs or n == "places": return None
      g = out["d" + n]
      return (g.reshape(shared[n], -1).sum(0) if shared.get(n, 1) > 1 else g).uop
    return tuple(gradient(n) for n in forward.args)
  inputs = {n: z.reshape(-1).contiguous() for n, z in inputs.items()}
  states = Tensor.empty(1, forward.size["states"], dtype=dtypes.float, device=device)
  return run_kernel(forward, inputs | dict(states=states), device, backward)

def fused(cfg:Rule, a:Tensor|None, memory:Memory, q:Tensor, k:Tensor, v:Tensor, gates:Gates, chunks:Chunks
          ) -> tuple[Tensor, Memory]:
  """rule.by_ops in one kernel, with one for its backward pass."""
  B, H, T, d = sizes(q)
  device, D = cast(str, q.device), feature_size(d, cfg.features, cfg.degree)
  row = FEATURES[cfg.features]
  wide = to_multiple(D, 16) if row.coefficients else D
  weights = tuple((n, sizes(w)[-2], wide if n in ("W", "W2", "W3") else sizes(w)[-1]) for n, w in memory.M.items())
  s = KernelShapes(B * H, H if memory.shared else B * H, H if memory.R else 0, divisor(B * H, NUM_CPU_THREADS.value),
                   T // chunks.size, chunks.size, sizes(k)[2] != T, d, sizes(v)[3], D, chunks.every, weights)
  lay = Layout(cfg, weights)
  inputs = dict(first=lay.pack([memory.base, memory.M, memory.S]), q=q, k=k, v=v)
  inputs |= dict(alpha=gates.alpha, eta=gates.eta, gamma=gates.gamma)
  if cfg.momentum: inputs["theta"] = gates.theta
  if memory.R: inputs["toward"] = lay.pack([memory.R])
  if row.coefficients:
    inputs["scales"] = monomial_scales(d, cfg.degree, cast(Tensor, a))
    inputs["places"] = monomial_table(d, cfg.degree, device)[0]
  shared = {"first": s.heads // s.first_heads, "toward": B, "scales": s.heads}
  out = run_recurrence(Recurrence, cfg, s, inputs, shared, device)
  rows = out["states"].reshape(B * H, -1, lay.size)
  shapes = {n: (B, H, *w.shape[-2:]) for n, w in memory.M.items()}
  M, S = lay.states(rows[:, -1], shapes)
  base, _ = lay.states(rows[:, 0 if s.chunks == 1 else -2], shapes)
  return out["y"].reshape(B, H, T, v.shape[3]), Memory(memory.R, base, M, S, False)

# *** the sequential pass in one kernel, on a GPU ***

class StatePass(Recurrence):
  """rule.over_chunks for linear steps: a work-group runs the chunks of a head.  Behind the states that a chunk starts
  with, a row of `states` has what rule.outputs needs: u of every matrix, and the hidden layer.  s.chunk is E here."""
  name, y = "states", []
  def streams(self):
    s, E = self.s, self.s.chunk
    self.row_size += sum(E * width for width in self.kept_widths())
    sources = int(self.cfg.momentum) + E
    return dict(x=s.chunks * E * s.D, k=s.chunks * E * s.d, v=s.chunks * E * s.dv, kept_M=s.chunks,
                rows=s.chunks * (1 + self.cfg.momentum) * sources)
  def kept_widths(self):
    return [width for n, o, i in self.s.weights for width in ((o, i) if n == "W1" else (o,))]
  def padded_inputs(self): return {}
  def chunk(self, g, n, padded, base, states):
    kernel, cfg, s, E = self.kernel, self.cfg, self.s, self.s.chunk
    skip = int(cfg.momentum)
    def stream(name, rows, width):
      return self.rows_of(name, rows, width, (g * s.chunks + n) * (rows * width))
    x, k, v, kept_M = [stream(*z) for z in (("x", E, s.D), ("k", E, s.d), ("v", E, s.dv), ("kept_M", 1, 1))]
    weights = stream("rows", 1 + skip, skip + E)
    if states.R:
      base = {name: (w + states.R[name]).stored() for name, w in base.items()}
    factors = gradients(cfg, base, x, k, v)
    start = (g * (s.chunks + 2) + n + 1) * self.row_size + self.lay.size
    for name, _, _ in s.weights:
      for m in factors[name] if name == "W1" else factors[name][:1]:
        kernel.assign(self.rows_of("states", E, m.shape[1], start), m)
        start = start + E * m.shape[1]
    of_M, of_S = [(weights.block(n, 1, skip, E), weights.block(n, 1, 0, 1)) for n in (0, skip)]
    next_states(kernel, cfg, factors, states, kept_M, of_M, of_S)

def states_by_kernel(body:Callable, cfg:Rule, memory:Memory, streams:dict[str, Tensor], fixed:dict[str, Tensor],
                     results:dict) -> tuple[Memory, Memory, dict[str, Tensor]]:
  """rule.over_chunks for linear steps, in one kernel and one for its backward pass."""
  (B, H, N, E, D), device = sizes(streams["x"]), cast(str, streams["x"].device)
  heads, weights = B * H, row_shapes(memory.M)
  s = KernelShapes(heads, heads, heads if memory.R else 0, heads, N, E, False, sizes(streams["k"])[-1],
                   sizes(streams["v"])[-1], D, 1, weights)
  lay = Layout(cfg, weights)
  inputs = dict(first=lay.pack([memory.base, memory.M, memory.S]))
  if memory.R: inputs["toward"] = lay.pack([memory.R])
  rows = run_recurrence(StatePass, cfg, s, inputs | streams, {}, device)["states"].reshape(B, H, N + 2, -1)
  def states(z):
    shapes = {n: (*sizes(z)[:-1], o, i) for n, o, i in weights}
    parts = lay.states(z.reshape(-1, z.shape[-1]), shapes)
    return [{n: w.contiguous_backward() for n, w in part.items()} for part in parts]
  kept = unpack(rows[:, :, 1:N + 1, lay.size:], results)
  (M, S), (M_starts, S_starts) = states(rows[:, :, N + 1]), states(rows[:, :, 1:N + 1])
  base = states(rows[:, :, N])[0] if N > 1 else memory.base
  return Memory(memory.R, base, M, S, False), Memory(memory.R, {}, M_starts, S_starts, False), kept

# *** steps that are not linear, on a GPU ***

GROUPS = 128                                # multiprocessors of a large GPU

@functools.cache
@Context(ALLOW_DEVICE_USAGE=1)              # which tinygrad forbids while it traces a function
def direction_kernel(cfg:Rule, weights:tuple[tuple[str, int, int], ...], rows:int, device:str, backward:bool
                     ) -> Compiled:
  """The directions of `rows` rows of matrices, each by a work-group; backward, their gradients."""
  row = sum(o * i for _, o, i in weights)
  size = {"room": 0} | {f"S.{n}": rows * o * i for n, o, i in weights} | ({"dU": rows * row} if backward else {})
  def build(*scratch):
    """room: the results, rows of U or dS, and behind them the scratch memory: one buffer is filled with zeros."""
    values, grads = [to_multiple(x, 16) for x in scratch[:2] or (0, 0)]
    parts = max(GROUPS, 2 ** 24 // (values + grads + 1))   # more of them where they take little memory
    parts = divisor(rows, min(rows, parts))
    first = to_multiple(rows * row, 16)
    size["room"] = first + parts * (values + grads)
    buffers = {n: UOp.placeholder((x,), dtypes.float, slot=slot) for slot, (n, x) in enumerate(size.items())}
    kernel = Kernel(buffers["room"], buffers["room"], not scratch, vectors(device), *scratch[2:])
    with kernel.parts(parts) as part:
      kernel.origin = first + part * (values + grads)
      kernel.grads_origin = kernel.origin + values
      with kernel.loop(rows // parts) as turn:
        place = part * (rows // parts) + turn
        at = place * row
        for name, o, i in weights:
          def matrix(n, start, grad=None): return Stored(kernel, buffers.get(n), (o, i), start, i, 1, grad)
          S = matrix(f"S.{name}", place * (o * i), matrix("room", at))
          U = matrix("none" if backward else "room", at, matrix("dU", at))
          def body(): kernel.assign(U, STEPS[cfg.optimizer].direction(S, cfg))
          kernel.memos.append({})
          if backward: kernel.backward(body)
          else: body()
          at = at + o * i
    name = "directions_backward" if backward else "directions"
    return kernel.code(name, sum(size.values())), (kernel.used, kernel.used_grads, kernel.most_local)
  sink, _ = build(*build()[1])
  return compiled(list(size), size, cast(UOp, sink), device)

def directions_by_kernel(cfg:Rule, S:dict[str, Tensor]) -> Tensor:
  """The directions U for S of every step (B,H,n,o,i), as rows (B,H,n,numbers): one kernel, and one for its backward
  pass."""
  first, weights = next(iter(S.values())), row_shapes(S)
  lead, device, numbers = sizes(first)[:-2], cast(str, first.device), sum(o * i for _, o, i in weights)
  def run(backward, inputs, grad_fxn=None):
    """Inside a function of tinygrad a new buffer would be one for all calls: zeros are made in every call."""
    kernel = direction_kernel(cfg, weights, math.prod(lead), device, backward)
    room = Tensor.zeros(kernel.size["room"], dtype=dtypes.float, device=device).contiguous()
    out = run_kernel(kernel, inputs | dict(room=room), device, grad_fxn)["room"]
    return out[:math.prod(lead) * numbers].reshape(*lead, numbers)
  def backward(g, call):
    sources = {f"S.{n}": Tensor(z) for (n, _, _), z in zip(weights, call.src[2:])}
    dS = run(True, sources | dict(dU=Tensor(g)[:math.prod(lead) * numbers].contiguous()))
    parts = unpack(dS, {n: (o * i,) for n, o, i in weights}, tuple(S))
    return None, *[z.reshape(-1).uop for z in parts.values()]
  return run(False, {f"S.{n}": s.reshape(-1).contiguous() for n, s in S.items()}, backward)

def chunk_by_kernel(cfg:Rule, z:dict[str, Tensor]) -> dict[str, Tensor]:
  """rule.chunk_step for steps that are not linear; U is one row of numbers a step."""
  new, factors = {}, gradients(cfg, at_base(z), z["x"], z["k"], z["v"])
  S = {n: weighted_sums(cfg, z["rows"], z.get(f"S.{n}"), u, x) for n, (u, x) in factors.items()}
  U = directions_by_kernel(cfg, S)
  change = unpack(-(z["C"].unsqueeze(-1) * U).sum(2).contiguous(), {n: sizes(s)[3:] for n, s in S.items()}, tuple(S))
  for n in S:
    new[f"M.{n}"] = number(z["kept_M"]) * z[f"M.{n}"] + change[n]
    if cfg.momentum: new[f"S.{n}"] = S[n][:, :, -1]
  return new | {"U": U}

def steps_by_kernel(body:Callable, cfg:Rule, memory:Memory, streams:dict[str, Tensor], fixed:dict[str, Tensor],
                    results:dict) -> tuple[Memory, Memory, dict[str, Tensor]]:
  """rule.over_chunks with the directions of a chunk's steps in one kernel."""
  n, shapes = sizes(streams["C"])[-1], {f"U.{name}": (o, i) for name, o, i in row_shapes(memory.M)}
  row = {"U": (n, sum(map(math.prod, shapes.values())))}
  after, starts, kept = over_chunks(chunk_by_kernel, cfg, memory, streams, fixed, row)
  return after, starts, unpack(kept["U"], shapes)

# *** all of it ***

def read_position(state:dict[str, Tensor]) -> int|None:
  """Tokens read so far, or None while a jit is being captured and no value can be read (but a constant)."""
  if (position := state["position"].uop.simplify()).op is Ops.CONST: return int(position.arg)
  try: return int(state["position"].item())
  except JitError: return None

def capacity_for(needed:int) -> int:
  """Entries of a cache that must hold `needed` tokens: a power of two, with room for as many again."""
  return max(64, 2 ** math.ceil(math.log2(2 * needed)))

def matrices(cfg:Rule, weights:Weights) -> Weights:
  """The matrices M_0 among the weights; features=exp: "u" in place of the first layer's."""
  M = {n: w for n, w in weights.items() if n not in ("a", "anchor_k", "anchor_u")}
  if not FEATURES[cfg.features].expansion: return M
  u = weights["anchor_u"]
  return M | {"u": u if u.shape[1] else u.pad((None, (0, 1), None))}

def initial_state(cfg:Rule, weights:Weights, B:int, key_dim:int, like:Tensor|None=None) -> dict[str, Tensor]:
  """The state before the first token: M_0, S_0 = 0, position 0.  A flat dict of Tensors: "position" (); "M.*", "S.*"
  (with momentum), "base.*" and "low.*" (B,H,out,in); "k" and "v" (B,H,window-1,.), the keys and values that a window
  still reaches.  features=exp: "keys" (B,H,L,key_dim), the anchors' keys and then the tokens', and "*.u" (B,H,L,out),
  their coefficients in place of the first layer.  Without anchors one entry belongs to no token: no tensor is empty.
  like (B,...): where it is cut along B over several devices, so is the state."""
  M = matrices(cfg, weights)
  first = M.get("W1", M.get("W", M.get("u")))
  assert first is not None
  H, device, expansion = first.shape[0], first.device, FEATURES[cfg.features].expansion
  dv = first.shape[2 if "W1" not in M and expansion else 1]
  if like is None: like = Tensor.zeros(B, 1, dtype=dtypes.float, device=device)
  def zeros(*shape):
    return Tensor.zeros(*shape, dtype=dtypes.float, device=device).contiguous()
  zero = {n: m.zeros_like() for n, m in M.items()}
  state = named("base", M) | named("M", M) | named("low", zero) | (named("S", zero) if cfg.momentum else {})
  if expansion:
    keys = weights["anchor_k"]
    state["keys"] = keys if keys.shape[1] else zeros(H, 1, key_dim)
  state = for_batch(state, like)
  if cfg.window > 1:
    state["k"] = zeros(B, H, cfg.window - 1, key_dim)
    state["v"] = zeros(B, H, cfg.window - 1, dv)
  return {"position": Tensor(0, dtype=dtypes.int, device=device)} | state

def recall(cfg:Rule, weights:Weights, state:dict[str, Tensor], q:Tensor) -> Tensor:
  """M(phi(q)), with the memory of a state as it is: q (B,H,T,key_dim) -> (B,H,T,value_dim)."""
  M = part_of(state, "M")
  def read(name, z):
    return matmul(z.contiguous(), M[name if name in M else "u"], yt=name in M)
  if not FEATURES[cfg.features].expansion:
    return apply(cfg, read, phi(cfg, q, weights.get("a")), q)
  return apply(cfg, read, matmul(q, state["keys"], yt=True).exp(), q)

def takes_fused(cfg:Rule, x:Tensor, heads:int, numbers:int) -> bool:
  """Whether the memory runs in kernels of its own on the device of x, for heads = B*H and so many numbers in M of one.
  auto: on a CPU one kernel is faster than many.  On a GPU a work-group, that is one multiprocessor, runs all chunks of
  a head; it loses where a chunk takes it longer than launching the stock kernels.  That bound is an estimate: no GPU
  was measured.  For steps that are not linear only their directions are a kernel, by the same bound."""
  if not isinstance(x.device, str) or FEATURES[cfg.features].expansion or cfg.backend == "ops": return False
  if on_cpu(x.device): return True
  small = numbers * cfg.chunk <= 2 ** 15 * max(heads, 8)
  return Device[x.device].renderer.has_local and (cfg.backend == "fused" or small)

def checked(name:str, x:Any, shape:tuple) -> Tensor:
  """x as float32.  ValueError unless it is a Tensor of that shape; None stands for an axis of any length."""
  if not isinstance(x, Tensor): raise ValueError(f"{name} is a {type(x).__name__} and no Tensor: give one of {shape}")
  if len(x.shape) != len(shape) or any(n is not None and n != m for n, m in zip(shape, x.shape)):
    expected = str(shape).replace("None", "any")
    raise ValueError(f"{name} has shape {x.shape}, and the memory takes {expected}: give it that shape")
  return x.cast(dtypes.float)

def size_of(x, axis):
  return sizes(x)[axis] if isinstance(x, Tensor) and x.ndim == 3 else None

def checked_weights(cfg:Rule, weights:Weights, name:str, H:int, d:int, dv:int) -> Weights:
  """The weights that the rule has, in their order, as float32.  ValueError names what is missing or does not fit."""
  row, hidden = FEATURES[cfg.features], size_of(weights.get("W1"), 2)
  D = feature_size(d, cfg.features, cfg.degree)
  shapes:dict[str, tuple] = {"W1": (H, dv, hidden), "W2": (H, hidden, D)}
  if cfg.memory == "gated": shapes["W3"] = (H, hidden, D)
  if cfg.memory == "linear": shapes = {"W": (H, dv, D)}
  if row.expansion:
    out = shapes.pop("W" if cfg.memory == "linear" else "W2")[1]
    P = size_of(weights.get("anchor_u"), 1)
    shapes |= {"anchor_k": (H, P, d), "anchor_u": (H, P, out)}
  if row.coefficients: shapes["a"] = (cfg.degree + 1,)
  if name == "toward":
    shapes = {n: shape for n, shape in shapes.items() if n not in ("a", "anchor_k")}
  for n in shapes:
    if n not in weights: raise ValueError(f"{name} has no {n}: the rule takes {', '.join(shapes)}")
  return {n: checked(f"{name}[{n!r}]", weights[n], shape) for n, shape in shapes.items()}

def checked_state(cfg:Rule, state:dict[str, Tensor], M:Weights, B:int, d:int, dv:int) -> dict[str, Tensor]:
  """The state, float32 but for its position.  ValueError where it belongs to another rule or another batch."""
  of_part = {n: (B, w.shape[0], None if n == "u" else w.shape[1], w.shape[2]) for n, w in M.items()}
  shapes = named("base", of_part) | named("M", of_part) | named("low", of_part)
  if cfg.momentum: shapes |= named("S", of_part)
  if cfg.window > 1:
    shapes["k"] = (B, None, cfg.window - 1, d)
    shapes["v"] = (B, None, cfg.window - 1, dv)
  if FEATURES[cfg.features].expansion: shapes["keys"] = (B, None, None, d)
  for n in ("position", *shapes):
    if n not in state: raise ValueError(f"state has no {n!r}: give what an earlier call with these settings returned")
  return state | {n: checked(f"state[{n!r}]", state[n], shape) for n, shape in shapes.items()}

def difference(part:Weights, R:Weights, sign:int) -> Weights:
  """part + sign * R.  features=exp: R has coefficients for the anchors only."""
  def extended(r, w):
    return r.pad((None, (0, w.shape[-2] - r.shape[-2]), None))
  return {n: w + sign * extended(R[n], w) for n, w in part.items()}

def new_state(after:Memory, R:Weights) -> dict[str, Tensor]:
  """The state's matrices after a call.  low.*: what float32 rounds away where M = R + difference is stored.  Without it
  a difference that fades by less than the rounding of M, call by call, would never fade.  Without R it is zero."""
  M, base, low = after.M, after.base, {n: w.zeros_like() for n, w in after.M.items()}
  if R:
    # M is stored, because the scheduler would simplify (R + difference) - R
    M = {n: w.contiguous() for n, w in difference(M, R, 1).items()}
    low = {n: after.M[n] - w for n, w in difference(M, R, -1).items()}
    base = difference(base, R, 1)
  return named("base", base) | named("M", M) | named("S", after.S) | named("low", low)

def key_cache(weights:Weights, state:dict[str, Tensor]|None, k:Tensor, known:int|None, position:Tensor
              ) -> tuple[Tensor, int|Tensor]:
  """features=exp: the anchors' keys and those of all tokens so far, the call's among them, (B,H,capacity,key_dim), and
  the entry of the call's first key.  The capacity doubles when it is full.  ValueError for a jitted call of several
  tokens."""
  T, P = sizes(k)[2], sizes(weights["anchor_k"])[1]
  if known is None and T > 1:
    raise ValueError("features=exp cannot jit a call of several tokens with a state: its expansion grows")
  if state is not None: old = state["keys"]
  elif P: old = for_batch({"keys": weights["anchor_k"]}, k)["keys"]
  else: old = (k[:, :, :1] * 0.0).contiguous()
  capacity = sizes(old)[2]
  if known is not None and P + known + T > capacity: capacity = P + capacity_for(known + T)
  old = old.pad((None, None, (0, capacity - sizes(old)[2]), None))
  if known is not None and (state is None or T > 1):
    place = P + known
    return old + k.pad((None, None, (place, capacity - place - T), None)), place
  entry = P + position
  here = Tensor.arange(capacity, dtype=dtypes.int).reshape(capacity, 1) == entry
  return old + here.where(k, 0), entry

def memory(cfg:Rule, weights:Weights, q:Tensor, k:Tensor, v:Tensor, alpha:Tensor, theta:Tensor, eta:Tensor,
           gamma:Tensor, state:dict[str, Tensor]|None=None, phase:int|None=None, *, toward:Weights|None=None
           ) -> tuple[Tensor, dict[str, Tensor]]:
  """Reads a stretch of the stream: updates the memory at every token, then reads it (Eq. 9, 10, 15, 16, 32, 33).

  q, k (B,H,T,key_dim); v, y (B,H,T,value_dim); alpha, theta, eta (B,H,T), final; gamma (B,H,T,window), gamma[...,j]
  gates token t-j.  weights: the initial memory, (H,out,in) per head: {"W"} for linear, {"W1","W2"} for mlp, and "W3"
  for gated; "a" (degree+1,) with poly; with exp "anchor_k" (H,P,key_dim) and "anchor_u" (H,P,out), keys and
  coefficients, in place of the first layer's.  All are cast to float32.  ValueError names an argument of another shape
  and the right one.

  state: what an earlier call returned, or None at the start of the stream.  Returns y and the state after the last
  token; any way of cutting a stream into calls gives the same y. toward: weights R that forgetting leads to, M_t =
  alpha_t M_{t-1} + (1 - alpha_t) R - eta_t U_t; None means zero. phase: how many tokens of the chunk came before, read
  from the state unless given.  Under TinyJit, where the state cannot be read, a call of one token may go anywhere.  A
  longer call with a state must start at a chunk's border, or `phase` tokens behind it; elsewhere it gives NaN, in y and
  in the state. cfg.backend: ops, fused (one kernel), or auto, the faster one."""
  if q.ndim != 4 or v.ndim != 4: raise ValueError(f"q and v have shapes {q.shape} and {v.shape}: give (B,H,T,size)")
  (B, H, T, d), dv = sizes(q), sizes(v)[3]
  weights = checked_weights(cfg, weights, "weights", H, d, dv)
  q, k = [checked(n, z, (B, H, T, d)) for n, z in (("q", q), ("k", k))]
  v, gamma = checked("v", v, (B, H, T, dv)), checked("gamma", gamma, (B, H, T, cfg.window))
  alpha, theta, eta = [checked(n, z, (B, H, T)) for n, z in (("alpha", alpha), ("theta", theta), ("eta", eta))]
  M_0 = matrices(cfg, weights)
  R = matrices(cfg, checked_weights(cfg, toward, "toward", H, d, dv)) if toward is not None else {}
  if state is not None: state = checked_state(cfg, state, M_0, B, d, dv)
  b, c, expansion = cfg.chunk, cfg.window, FEATURES[cfg.features].expansion
  muon_every = 1 if STEPS[cfg.optimizer].linear else cfg.muon_every

  # known: the position where it can be read and is needed.  The graph of one token must hold for any position.
  if state is None or T == 1 and not expansion: known:int|None = 0
  else: known = read_position(state) if phase is None or expansion else None
  if T == 1: phase = 0
  elif known is not None: phase = known % b
  elif phase is None: phase = 0

  # the memory at the call's start; gradients are taken at the memory of the chunk's start
  if state is None:
    position = Tensor(0, dtype=dtypes.int, device=q.device)
    M = base = M_0
    S = {n: m.zeros_like().contiguous() for n, m in M_0.items()} if cfg.momentum else {}
  else:
    position = state["position"]
    M, base = [{n: state[f"{part}.{n}"] for n in M_0} for part in ("M", "base")]
    S = {n: state[f"S.{n}"] for n in M_0} if cfg.momentum else {}
    if T == 1:
      base = {n: (position % b == 0).where(M[n], w) for n, w in base.items()}
    elif phase == 0: base = M
  at_start = base is M
  if R:
    M, base = difference(M, R, -1), difference(base, R, -1)
    if state is not None:
      M = {n: w + state[f"low.{n}"] for n, w in M.items()}
    if at_start: base = M
  before = Memory(R, base, M, S, state is None)

  # Rows: the call is padded to whole chunks of `size` tokens, `front` before it and `back` behind.  With chunk=4, a
  # call of 6 tokens at position 7 (phase 3) is padded to 3 + 6 + 3 = 3 chunks.  A call that ends within its first chunk
  # needs no padding: its tokens are the only chunk's rows.
  if phase + T <= b:
    front, aligned = 0, T > 1 and phase % muon_every == 0 and T % muon_every == 0
    chunks = Chunks(T, muon_every if aligned else 1)
  else: front, chunks = phase, Chunks(b, muon_every)
  back = -(front + T) % chunks.size
  def padded(z, fill=0.0):
    if front + back == 0: return z
    return z.pad((None, None, (front, back), *[None] * (z.ndim - 3)), value=fill)

  # gates: no window reaches before the stream, Muon steps come at every r-th token, padding leaves the memory as it is
  index = position + Tensor.arange(T, dtype=dtypes.int)
  gamma = (index.unsqueeze(-1) >= Tensor.arange(c, dtype=dtypes.int)).where(gamma, 0)
  if muon_every > 1: eta = ((index + 1) % muon_every == 0).where(eta, 0)
  gates = Gates(padded(alpha, 1.0), padded(theta, 1.0), padded(eta), padded(gamma))
  streams = {"k": k, "v": v}
  if state is not None and c > 1:
    streams = {n: state[n].cat(z, dim=2) for n, z in streams.items()}
  keys, values = padded(streams["k"]), padded(streams["v"])

  # valid: whether the call is where its graph may be used; None: always
  valid = None if known is not None or T == 1 else position % b == phase
  new:dict[str, Tensor] = {}
  if expansion:
    keys_now, place = key_cache(weights, state, k, known, position)
    used = keys_now[:, :, :place + T] if isinstance(place, int) else keys_now
    chunks = chunks._replace(first=place - front - (c - 1))
    y, after = by_expansion(cfg, used, before, padded(q), keys, values, gates, chunks)
    new["keys"], capacity = keys_now, sizes(keys_now)[2]
    if isinstance(place, Tensor): valid = place < capacity
    base, M, S = [with_entries(part, capacity) for part in (after.base, after.M, after.S)]
    after = Memory(R, base, M, S, False)
  else:
    form:Callable = by_ops
    if takes_fused(cfg, q, B * H, sum(math.prod(sizes(w)[-2:]) for w in M_0.values())):
      over = states_by_kernel if STEPS[cfg.optimizer].linear else steps_by_kernel
      form = fused if on_cpu(q.device) else functools.partial(by_ops, over=over)
    y, after = form(cfg, weights.get("a"), before, padded(q), keys, values, gates, chunks)
  new |= new_state(after, R) | {"position": position + T}
  if c > 1:
    if state is None:
      streams = {n: z.pad((None, None, (c - 1, 0), None)) for n, z in streams.items()}
    new |= {n: z[:, :, sizes(z)[2] - c + 1:] for n, z in streams.items()}
  y = y[:, :, front:front + T]
  if valid is not None:
    y = valid.where(y, math.nan)
    new = {n: z if n == "position" else valid.where(z, math.nan) for n, z in new.items()}
  # clones: a jit must not return what is the caller's, nor what a later call in it may overwrite
  return y, {n: z.clone() for n, z in new.items()}

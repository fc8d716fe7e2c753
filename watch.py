"""A page on what a model does while it reads a text: what surprises it, how its memory moves, and what it recalls.

`read` returns what happened at every token, as arrays; `Page` fills them into the pieces of assets/watch.html."""
from __future__ import annotations
import base64, functools, html, math, re, string, struct, zlib
from pathlib import Path
from typing import Any, Iterator, NamedTuple
import numpy as np
from tinygrad import Tensor, TinyJit
from tqdm import tqdm
import atlas, evaluate, kernels, rule

Arrays = dict[str, np.ndarray]

TOKENS = 8192                # longest text
SIDE = 256                   # rows and columns of a picture: of a longer text, groups of tokens share one
ROWS = 20_000                # rows of numbers in a page: of longer texts and larger models, it has every n-th token's
TEMPLATE = Path(__file__).parent / "assets" / "watch.html"
CHARTS = {"change": "change |M_t - M_(t-1)|", "distance": "distance |M_t - M_0|", "alpha": "forget gate alpha",
          "theta": "momentum gate theta", "eta": "step eta", "gamma": "window, sum of gamma"}

# *** what a model does at every token ***
class Reading(NamedTuple):
  """What a model did at each of N tokens.  Blocks are named as in the state."""
  logits: np.ndarray            # (N,vocab)
  ends: np.ndarray              # borders of the groups of tokens: rows and columns of the pictures
  lines: dict[str, Arrays]      # block -> name -> (N,H) or (N,H,window): CHARTS; errors of M_N (error) and M_0
  pictures: Arrays              # block -> (H,time,group): errors of recall, or shares of attention; NaN: not read yet

def recall_errors(p:dict, cfg:atlas.Config, state:dict, k:Tensor, v:Tensor) -> Tensor:
  """|M(phi(k)) - v| / |v| of a state's memory, k and v (1,H,N,.) -> (H,N).  The key that a residual adds is taken away
  again, as in atlas.answer."""
  y = kernels.recall(cfg, atlas.memory_weights(p, cfg), state, k)
  if atlas.has_residual(cfg): y = y - k
  if atlas.stores_key(cfg): v = v - k
  error, size = (y - v).square().sum(-1), v.square().sum(-1)
  return (error / size).sqrt()[0]

def attention_shares(p:dict, cfg:atlas.Config, q:Tensor, k:Tensor, t:Tensor, groups:Tensor) -> Tensor:
  """The attention of token t, q (1,H,1,d), to groups (N,G) of the tokens, k (1,H,N,d) -> (H,G).  It is the output of
  attention if a token's value is the name of its group."""
  N, G = groups.shape
  values = groups.expand(1, cfg.heads, N, G)
  oldest = (t - cfg.attn_window + 1).maximum(0) if cfg.attn_window else 0
  persist = atlas.persistent(p, cfg)
  if persist: persist = persist[0], Tensor.zeros(cfg.heads, cfg.persist, G)
  return atlas.softmax_attention(q, k, values, t, persist, oldest)[0, :, 0]

def grouped(errors:np.ndarray, ends:np.ndarray) -> np.ndarray:
  """The mean over each group of tokens, (H,N) -> (H,groups)."""
  return np.add.reduceat(errors, ends[:-1], axis=1) / np.diff(ends)

class Reader:
  """Reads a text token by token."""
  def __init__(self, params:dict, cfg:atlas.Config, length:int):
    self.params, self.cfg = params, cfg
    self.softmax = cfg.mixer == "attention"
    prefix = "" if self.softmax or cfg.mixer == "memory" else ".memory"
    self.blocks = {f"{i}{prefix}": p for i, p in params["layers"].items()}
    self.ends = np.linspace(0, length, min(length, SIDE) + 1).astype(int)
    sizes = np.diff(self.ends)
    names = np.eye(len(sizes), dtype=np.float32)
    self.groups = Tensor(np.repeat(names, sizes, axis=0)).realize()
    self.start: dict[str, Tensor] = {}                   # the memories before the first token
    for i, p in {} if self.softmax else self.blocks.items():
      memory = kernels.initial_state(cfg, atlas.memory_weights(p, cfg), 1, cfg.key_dim)
      for name, z in memory.items():
        if name.startswith(("M.", "low.", "keys")): self.start[f"{i}.{name}"] = z
    self.shapes: dict[str, tuple] = {}
    self.step = evaluate.token_step(cfg, self.forward)
    self.jitted: dict[int|None, Any] = {}

  def forward(self, token:Tensor, state:dict|None) -> tuple[Tensor, dict]:
    """One token's logits, the inputs of all heads and the memories after it, in one tensor, which is copied at once."""
    h, after, inputs = atlas.hidden(self.params, self.cfg, token, state)
    logits = atlas.linear(self.cfg, h, self.params["embed"].float())
    results = {"logits": logits.unsqueeze(0)} | inputs
    results |= {name: after[name] for name in self.start if not name.endswith(".keys")}
    self.shapes |= {name: z.shape for name, z in results.items()}
    packed = Tensor.cat(*[z.reshape(-1) for z in results.values()])
    return packed, after

  def unpacked(self, packed:np.ndarray) -> Arrays:
    borders = np.cumsum([math.prod(shape) for shape in self.shapes.values()])[:-1]
    pieces = np.split(packed, borders)
    named = zip(self.shapes.items(), pieces)
    return {name: z.reshape(shape) for (name, shape), z in named}

  def look(self, memories:dict, vectors:dict, t:Tensor) -> list[Tensor]:
    """Errors of recall (H,N) of every block's memory, or the attention of token t (H,groups)."""
    looks = []
    for i, p in self.blocks.items():
      q, k, v = [vectors[f"{i}.{name}"] for name in "qkv"]
      if self.softmax: looks.append(attention_shares(p, self.cfg, q, k, t, self.groups))
      else: looks.append(recall_errors(p, self.cfg, rule.part_of(memories, i), k, v))
    return looks

  def looked(self, state:dict, seen:Arrays, t:int) -> list[np.ndarray]:
    """See look.  Keys behind token t are zeros in `seen`, and mean nothing in the result."""
    vectors = {name: Tensor(z) for name, z in seen.items() if name.endswith((".k", ".v"))}
    for name, z in seen.items():
      if name.endswith(".q"): vectors[name] = Tensor(z[:, :, t:t + 1])
    memories = {name: state[name] for name in self.start}
    room = atlas.room(self.cfg, state)
    jitted = self.jitted.setdefault(room, TinyJit(self.look))
    return [z.numpy() for z in jitted(memories, vectors, Tensor([t]))]

  def flat(self, arrays:dict[str, Any], i:str) -> np.ndarray:
    """All matrices of block i's memory, (H,numbers); coefficients, which grow in number, come last."""
    M, low = [rule.part_of(arrays, f"{i}.{part}") for part in ("M", "low")]
    rows = []
    for name in sorted(M):
      matrix = M[name].astype(np.float64) + low[name]
      rows.append(matrix.reshape(self.cfg.heads, -1))
    return np.concatenate(rows, axis=1)

def norms(M:np.ndarray, earlier:np.ndarray) -> np.ndarray:
  """|M - earlier| of every head."""
  added = M.shape[1] - earlier.shape[1]
  return np.linalg.norm(M - np.pad(earlier, ((0, 0), (0, added))), axis=1)

def read(params:dict, cfg:atlas.Config, ids:list[int]) -> Reading:
  """Reads tokens one by one.  At the end of each group the memory is asked for the keys of all tokens so far."""
  N, reader = len(ids), Reader(params, cfg, len(ids))
  ends, state = reader.ends, None
  start = {name: z.numpy() for name, z in reader.start.items()}
  M_0 = {i: reader.flat(start, i) for i in reader.blocks if start}
  lines: dict[str, Arrays] = {}
  for i in M_0:
    lines[i] = {name: np.zeros((N, cfg.heads)) for name in ("change", "distance")}
  tensor_of = functools.cache(lambda token: Tensor([[token]]).realize())
  seen, looks, before = Arrays(), list[list](), M_0
  for t, token in enumerate(tqdm(ids, desc="reading", unit="token", leave=False)):
    packed, state = reader.step(tensor_of(token), state)
    results = reader.unpacked(packed.numpy())
    M = {i: reader.flat(results, i) for i in M_0}
    for i, line in lines.items():
      line["change"][t] = norms(M[i], before[i])
      line["distance"][t] = norms(M[i], M_0[i])
    before = M
    for name, z in results.items():
      if name in start: continue
      if t == 0:
        B, H, _, *size = z.shape
        seen[name] = np.zeros((B, H, N, *size), np.float32)
      seen[name][:, :, t] = z[:, :, 0]
    if t + 1 in ends: looks.append(reader.looked(state, seen, t))

  pictures = {}
  for i, errors in zip(reader.blocks, zip(*looks)):
    rows = errors if reader.softmax else [grouped(z, ends) for z in errors]
    pictures[i] = np.stack(rows, axis=1)
    pictures[i][:, *np.triu_indices(len(ends) - 1, 1)] = np.nan
  sizes = np.diff(ends)
  for i, last in zip(reader.blocks, looks[-1]):
    if not reader.softmax: lines[i]["error"] = last.T
    else: lines[i] = {"last": np.repeat(last / sizes, sizes, axis=1).T}
  vectors = {name: Tensor(z) for name, z in seen.items()}
  baselines = reader.look(reader.start, vectors, Tensor([N])) if start else []
  for (i, line), baseline in zip(lines.items(), baselines):
    line["error_M_0"] = baseline.numpy().T
    for gate in atlas.gate_sizes(cfg):
      line[gate] = np.moveaxis(seen[f"{i}.{gate}"][0], 0, 1)
  logits = seen["logits"][0, 0]
  return Reading(logits, ends, lines, pictures)

# *** pictures ***
def shades(x:np.ndarray) -> np.ndarray:
  """Colours (rows,columns,4) of values from 0, dark, to 1, bright; others are clipped, NaN is clear.  Lightness rises
  evenly, so that they can be told apart without hue."""
  stops = np.array([(12, 10, 40), (75, 40, 120), (170, 65, 115), (235, 125, 80), (252, 235, 160)])
  level = np.clip(np.nan_to_num(x), 0, 1)
  level = np.round(level * 63) / 63 * (len(stops) - 1)                     # 64 colours, so that files are small
  channels = [np.interp(level, range(len(stops)), stop) for stop in stops.T]
  opacity = np.where(np.isnan(x), 0, 255)
  return np.stack([*channels, opacity], axis=-1).astype(np.uint8)

def png(pixels:np.ndarray) -> str:
  """Pixels (rows,columns,4) as an image, in an address that a page can show."""
  def chunk(kind, content):
    size, check = [struct.pack(">I", n) for n in (len(content), zlib.crc32(kind + content))]
    return size + kind + content + check
  height, width, _ = pixels.shape
  header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
  rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))              # each begins with its filter, 0: none
  image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
  image += chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)) + chunk(b"IEND", b"")
  return "data:image/png;base64," + base64.b64encode(image).decode()

# *** the page ***
def characters(ids:list[int]) -> Iterator[tuple[str, str]]:
  """What the page shows of each byte, and its class.  A byte that no character shows is shown by its number."""
  for char in bytes(ids).decode(errors="surrogateescape"):
    further = len(char.encode(errors="surrogateescape")) - 1
    if char == "\n": yield char, "line"
    elif char.isprintable(): yield html.escape(char), "one"
    else: yield "", "raw"
    yield from [("", "more" if char.isprintable() else "raw")] * further

class Page:
  """Fills in the pieces of assets/watch.html."""
  def __init__(self, ids:list[int], is_bytes:bool, seen:Reading):
    content = TEMPLATE.read_text(encoding="utf-8")
    self.pieces = dict(re.findall(r"<!-- piece (\w+) -->\n(.*?)(?=<!-- piece|\Z)", content, re.DOTALL))
    self.ids, self.is_bytes, self.seen = ids, is_bytes, seen
    self.lowest = min(float(np.nanmin(z)) for z in seen.pictures.values())

  def fill(self, piece:str, **values:Any) -> str:
    return string.Template(self.pieces[piece]).substitute(values)
  def name(self, token:int) -> str:
    if not self.is_bytes: return str(token)
    return html.escape(repr(bytes([token]))[1:])

  def chart(self, label:str, values:np.ndarray) -> str:
    top = float(values.max()) or 1.0
    y = np.round(100 - 100 * values / top).astype(int)
    path = f"M.5 {y[0]}" + "".join(f"l1 {step}" for step in np.diff(y))
    return self.fill("chart", label=f"{label}, up to {top:.3g}", tokens=len(values), path=path)

  def picture(self, label:str, values:np.ndarray, shape:str="square") -> str:
    return self.fill("picture", label=label, shape=shape, source=png(shades(values)))

  def recall(self, image:np.ndarray, end:np.ndarray, start:np.ndarray) -> str:
    def scaled(z): return (z - self.lowest) / (1 - self.lowest)
    means = f"mean error {end.mean():.3f} at the end, {end[-16:].mean():.3f} for the last 16 tokens"
    square = self.picture(f"recall: {means}; dark {self.lowest:.2f}, bright 1", scaled(image))
    strip = scaled(grouped(start[None], self.seen.ends))
    return square + self.picture(f"recall by M_0: mean error {start.mean():.3f}", strip, "strip")

  def head(self, block:int, i:str, head:int) -> str:
    """The panels and the numbers of one head."""
    N, images = len(self.ids), self.seen.pictures[i]
    line = {name: z[:, head].reshape(N, -1) for name, z in self.seen.lines[i].items()}
    panels = ""
    for name, label in CHARTS.items():
      if name in line: panels += self.chart(label, line[name].sum(1))
    if "error" in line: panels += self.recall(images[head], line["error"][:, 0], line["error_M_0"][:, 0])
    else: panels += self.picture("attention, square root", np.sqrt(images[head]))
    columns = np.concatenate(list(line.values()), axis=1)
    every = -(-N * len(images) * len(self.seen.pictures) // ROWS)
    names = [f"{name}{j or ''}" for name, z in line.items() for j in range(z.shape[1])]
    rows = [["token", *names]]
    for t in range(0, N, every):
      rows.append([str(t), *[f"{x:.5g}" for x in columns[t]]])
    numbers = "\n".join("\t".join(row) for row in rows)
    return self.fill("head", block=block, head=head + 1, panels=panels, numbers=numbers)

  def tokens(self, logs:np.ndarray, bits:np.ndarray) -> tuple[str, str]:
    """The text, and the rows of its numbers."""
    text, rows = "", ""
    shown = characters(self.ids) if self.is_bytes else ((f"{i} ", "one") for i in self.ids)
    for t, (token, (content, kind)) in enumerate(zip(self.ids, shown)):
      likeliest = np.argsort(-logs[t], kind="stable")[:5]
      cells = [str(t), self.name(token), f"{bits[t]:.5g}" if t else ""]
      cells += [f"{self.name(i)} {math.exp(logs[t, i]):.5g}" for i in likeliest]
      level = f"s{min(8, round(bits[t]))}"
      text += f'<b class="{level} {kind}" data-b="{token:02x}" title="{cells[2]} bits">{content}</b>'
      rows += "<tr><td>" + "<td>".join(cells) + "\n"
    return text, rows

  def write(self, path:Path, summary:str) -> None:
    logs = self.seen.logits[:, :256 if self.is_bytes else None].astype(np.float64)
    logs -= logs.max(1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(1, keepdims=True))
    places = np.arange(len(self.ids) - 1)
    bits = -logs[places, self.ids[1:]] / math.log(2)
    if len(bits): summary += f"  Mean surprise {bits.mean():.3f} bits."
    bits = np.append(0, bits)                            # nothing is expected of the first token
    text, rows = self.tokens(logs, bits)
    charts, blocks = self.chart("surprise in bits", bits), ""
    for name in ("change", "distance"):
      lines = [line[name] for line in self.seen.lines.values() if name in line]
      if not lines: continue
      squares = np.square(np.concatenate(lines, axis=1))
      charts += self.chart(f"{CHARTS[name]}, all heads", np.sqrt(squares.sum(1)))
    for number, (i, images) in enumerate(self.seen.pictures.items(), 1):
      heads = "".join(self.head(number, i, head) for head in range(len(images)))
      blocks += self.fill("block", block=number, heads=heads)
    page = self.fill("page", summary=html.escape(summary), text=text, charts=charts, rows=rows, blocks=blocks)
    path.write_text(page, encoding="utf-8")

def watch(params:dict, cfg:atlas.Config, ids:list[int], is_bytes:bool, out:Path, weights:Path) -> None:
  """Writes out/watch.html: what a model did while it read the tokens."""
  settings = ", ".join(f"{name}={x}" for name, x in vars(cfg).items() if x != getattr(atlas.Config, name))
  summary = f"{len(ids):,} {'bytes' if is_bytes else 'tokens'} read with the weights of {weights} ({settings})."
  page = Page(ids, is_bytes, read(params, cfg, ids))
  out.mkdir(parents=True, exist_ok=True)
  page.write(out / "watch.html", summary)
  print(f"written to {out / 'watch.html'}: open it in a browser")

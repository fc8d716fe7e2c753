"""Claims about text, tasks, the command line and runs.

python -m pytest -q test_train.py            the main paths
python -m pytest -q test_train.py -m runs    drawn bad input, kills and full disks, the step cache, experiments"""
# test_atlas comes first, because it sets variables that tinygrad reads when it is imported.
from test_atlas import PRESETS, SMALL, array, cases, marked, norm, oracle, record, relative, resident_mb, rng, runs
from test_atlas import sigmoid, slow, small, unit, windows
import contextlib, csv, dataclasses, functools, importlib.util, itertools, json, math, operator, os, pickle
import re, resource, shlex, shutil, signal, subprocess, sys, time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from unittest.mock import Mock, patch
import numpy as np
import pytest
import atlas, data, evaluate, experiments, kernels, train
from tinygrad import Device, Tensor, dtypes, helpers
from tinygrad.nn.state import get_state_dict, safe_load, safe_save

pytestmark = pytest.mark.xdist_group("train")            # in one process, which compiles every training step once
TINY = " ".join(f"{key}={value}" for key, value in SMALL.items() if key != "vocab")     # that of bytes or of a task
HERE, same = Path(__file__).parent, np.array_equal
def experiment(test): return runs(pytest.mark.xdist_group("experiments")(test))
def raises(message): return pytest.raises(ValueError, match=message)

def table(text):
  """The rows of a table in text: what stands before and after each arrow.  A bar ends a row, as a new line does."""
  return [[cell.strip() for cell in row.split("->")] for row in re.split(r"[|\n]", text.strip())]

@pytest.fixture(scope="module", autouse=True)
def settings(tmp_path_factory):
  """All tests share one step cache, kernels that were compiled before, and a short validation."""
  variables = {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "CACHEDB": helpers.CACHEDB}
  with patch.dict(os.environ, variables), patch.object(evaluate, "VALIDATION_TOKENS", 64):
    with patch.object(data, "python_source", functools.cache(data.python_source)): yield

@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  return tmp_path

@pytest.fixture
def run(capfd):
  """A function of a command line, its exit code and a program, which runs it in this process and returns what it prints
  as (out, err), without progress bars.  A fault takes one line.  Keys in capitals are environment variables."""
  def command(line, code=0, program=train.main):
    capfd.readouterr()
    with patch.dict(os.environ, re.findall(r"\b([A-Z_]+)=(\S+)", line)):
      assert program(re.sub(r"\b[A-Z_]+=\S+", "", line).split()) == code
    shown = capfd.readouterr()
    lines = [line for line in re.split("[\r\n]", shown.err) if line.strip(" \x1b[A") and "%|" not in line]
    assert code == 0 or len(lines) == 1, lines
    return shown._replace(err="\n".join(lines))
  return command

@pytest.fixture
def refused(run): return lambda line, code=2, program=train.main: run(line, code, program).err

def process(line, code=0, before="", **variables):
  """What a command line prints in a process of its own, with the same short validation, after some lines of Python."""
  script = f"import sys, train, evaluate\nevaluate.VALIDATION_TOKENS = 64\n{before}\nsys.exit(train.main(sys.argv[1:]))"
  done = subprocess.run([sys.executable, "-c", script, *line.split()], capture_output=True, text=True,
                        env=os.environ | {"PYTHONPATH": str(HERE)} | variables)
  assert done.returncode == code, done.stderr
  return done.stdout + done.stderr

# *** text ***

def test_batches_are_a_function_of_seed_and_step_and_each_validation_window_counts_once():
  tokens = np.arange(103, dtype=np.uint8)
  (x, y), (again, _), (later, _) = [data.batch(tokens, 4, 10, seed=3, step=step) for step in (7, 7, 8)]
  assert x.shape == (4, 10) and same(y, x + 1) and same(x, again) and not same(x, later)
  targets = np.concatenate([y for _, y in data.windows(tokens, 4, 10, 1000)])
  counted, empty = (targets >= 0).all(1), (targets == -100).all(1)
  assert counted.sum() == 10 and (counted | empty).all() and targets.max() == 102

def written(name, content):
  Path(name).parent.mkdir(parents=True, exist_ok=True)
  Path(name).write_bytes(content)
  return name

def loaded(name, content, vocab=256): return data.load(written(name, content), vocab, 16)
def numbers(low, high, count, dtype): return rng(0).integers(low, high, count).astype(dtype).tobytes()

def shard(magic, version, count, size=0):
  """A token file: its header, then `size` zero bytes."""
  return np.array([magic, version, count] + [0] * 253, "<i4").tobytes() + bytes(size)

GPT2, JUNK = shard(20240520, 1, 500), bytes(range(256))

@cases("name,header,dtype", [("t.bin", GPT2, "<u2"), ("t.txt", GPT2, "<u2"), ("t.bin", b"", "<u2"),
                             ("t.bin", shard(20240801, 7, 500), "<u4")])
@cases("place", [3, 499])                # in training, in validation
def test_token_files_are_read_by_their_header_and_not_outside_the_vocabulary(name, header, dtype, place):
  tokens = np.arange(500) % 290
  tokens[place] = 299
  content = header + tokens.astype(dtype).tobytes()
  text = loaded(name, content, 300)
  assert not text.is_bytes and same(np.concatenate([text.train, text.val]), tokens)
  with raises("token 299, outside vocab=299: give vocab=300"): loaded(name, content, 299)

@cases("dtype", ["<u4", "<i8"])
def test_wide_ids_without_a_header_are_refused_and_any_narrow_ones_are_read(dtype):
  ids = rng(0).integers(0, 49_999, 4000)
  for vocab, wide in ((50257, ids), (200, ids % 149)):
    with raises("looks like ids of 32 bits"): loaded("t.bin", wide.astype(dtype).tobytes(), vocab)
  with raises("uint16 is too small for vocab=262144: write 256 int32"): loaded("t.bin", ids.tobytes(), 1 << 18)
  for narrow in (ids, ids % 200, ids % 2, ids * 0):
    assert len(loaded("t.bin", narrow.astype("<u2").tobytes(), 65_536).val) == 400

FORMATS = {
  "zstd": b"\x28\xb5\x2f\xfd", "SevenZip": b"7z\xbc\xaf\x27\x1c", "Parquet": b"PAR1", "HDF5": b"\x89HDF\r\n\x1a\n",
  "SQLite": b"SQLite format 3\0", "PDF": b"%PDF-1.7\n", "PNG": b"\x89PNG\r\n\x1a\n", "JPEG": b"\xff\xd8\xff\xe0",
  "ELF": b"\x7fELF\2\1\1", "GGUF": b"GGUF\3\0", "RIFF": b"RIFF\0\0\0\0WAVEfmt ", "Ogg": b"OggS\0", "GIF": b"GIF89a",
  "Arrow": b"ARROW1\0\0"}
PACKED = """zip -> some.zip | gzip -> some.tar.gz | bzip2 -> some.tar.bz2 | xz -> some.tar.xz | tar -> some.tar
  pickle -> some.pickle | NumPy -> some.npy | safetensors -> some.safetensors"""

@cases("ending", ["txt", "bin"])
def test_a_binary_format_is_named_and_refused_whatever_the_ending(ending):
  written("some/text.txt", b"some text " * 300)
  for archive in ("zip", "tar", "gztar", "bztar", "xztar"): shutil.make_archive("some", archive, "some")
  written("some.pickle", pickle.dumps(list(range(999))))
  np.save("some.npy", np.arange(999))
  safe_save({"w": Tensor([1.0])}, "some.safetensors")
  packed = {kind: Path(name).read_bytes() for kind, name in table(PACKED)}
  for kind, content in (FORMATS | packed).items():
    with raises(f"^.* is a {kind} file.*: unpack it, or convert it.*$"): loaded(f"t.{ending}", content + JUNK * 8)

def test_other_bytes_are_text():
  for text in (b"PARADE 1\n", b"MZ is a country code\n", "\u00e4\u00f6\u00fc\n".encode(), b"\xe4\xf6\xfc\n", JUNK[1:],
               "\ufefftext\n".encode("utf-16-le")): assert loaded("t.txt", text * 99).is_bytes, text

FOLDER = """b.py -> 222 | a.txt -> 111 | sub/latin1.txt -> \xe4 | sub/empty -> | .env -> secret
  .hidden/a.txt -> hidden | .git/objects/pack -> pack | sub/nul.txt -> text\0text | sub/x.bz2 -> BZh91AY&SY
  sub/random -> \x01\xff\x02"""
LINKS = "z_again -> a.txt | c_link -> ../outside.txt | c_twice -> ../outside.txt | sub/loop -> .. | gone -> nowhere"

def test_a_folder_is_its_text_in_order_and_says_what_it_leaves_out_or_cannot_read(folder):
  written("outside.txt", b"3" * 300)
  for name, content in table(FOLDER): written(f"clone/{name}", content.encode("latin1") * 100)
  for name, target in table(LINKS): Path("clone", name).symlink_to(target)
  Path("loop").symlink_to("loop")
  os.mkfifo("clone/pipe")
  text = data.load("clone", 256, 16)
  joined = np.concatenate([text.train, text.val]).tobytes()
  assert joined == b"1" * 300 + b"2" * 300 + b"3" * 300 + b"\xe4" * 100
  left_out = re.fullmatch(r"clone \(left out: (.*)\)", text.name)
  assert left_out and sorted(left_out[1].split(", ")) == ["2 read already", "3 hidden", "3 not files", "3 not text"]
  assert same(data.load("clone/.hidden/..", 256, 16).train, text.train)
  for limits in ((1, 1 << 32), (99, 999)):               # data=/ must not read all of a disk
    with patch.object(data, "FOLDER", limits), raises("give a smaller folder"): data.read("clone")
  for name in "a.txt b.py c_link c_twice z_again sub/latin1.txt".split(): Path("clone", name).unlink()
  with raises("holds no text .left out: 3 hidden"): data.read("clone")
  written("clone/shard.bin", GPT2)
  with raises("holds token files: name one, data=.*shard.bin"): data.read("clone")
  with raises("does not exist, or is neither a file nor a folder"): data.read("loop")
  denied = PermissionError(13, "Permission denied", "clone/shard.bin")
  with patch.object(type(folder), "read_bytes", side_effect=denied):
    for spec in ("clone", "clone/shard.bin"):
      with raises("shard.bin cannot be read .Permission denied.: give"): data.read(spec)

@cases("name", ["t.txt", "t.bin"])
def test_a_file_rewritten_while_it_is_read_cannot_harm(name, monkeypatch):
  content, path = numbers(1, 200, 40_000, "<u2"), Path(name)
  in_memory = loaded(name, content)
  monkeypatch.setattr(data, "IN_MEMORY", 1000)
  mapped = loaded(name, content)
  first, second = [data.batch(text.train, 4, 16, 0, 0) for text in (in_memory, mapped)]
  assert same(first, second) and isinstance(mapped.train, np.memmap) and in_memory.stamp is None
  data.unchanged(mapped)
  for change in (lambda: os.utime(path, (1, 1)), lambda: path.write_bytes(content + b"more"), path.unlink):
    change()
    with raises("was changed while it is read: copy it"): data.unchanged(mapped)
    data.unchanged(in_memory)

def test_the_digest_of_the_training_part_notices_other_text_of_the_same_length(monkeypatch):
  content = numbers(97, 105, 400_000, np.uint8)
  def digests(content): return operator.attrgetter("sample_digest", "digest")(loaded("t.txt", content))
  sample, rest = digests(content)
  for place in (0, 65_536, 200_001, 359_999):            # all of a small text
    changed, same_rest = digests(content[:place] + b"z" + content[place + 1:])
    assert changed != sample and same_rest == rest
  assert digests(content) == (sample, rest)
  monkeypatch.setattr(data, "BLOCK", 16)                 # 1,024 blocks of a large one: 1 byte of 22
  assert digests(content)[0] != digests(content[:360_000][::-1] + content[360_000:])[0]

# *** tasks ***

def examples(batch): return zip(*[z.tolist() for z in batch])             # tokens and labels of each

SPECIAL = """mqar:vocab=128,length=64,pairs=8,again=8,noise=1 copy:vocab=2 in_context_recall:vocab=4,length=4
  in_context_recall:vocab=6 noisy_recall:noise=0.9,vocab=20,length=4 noisy_recall:vocab=144
  fuzzy_recall:vocab=7,length=18 fuzzy_recall:vocab=128,length=1024 selective_copying:vocab=3,length=3,copies=1
  compression:vocab=3,length=2 memorization:vocab=3 memorization:vocab=9 babi:question=5"""

@cases("spec", [*data.TASKS, *SPECIAL.split()])
def test_a_task_is_a_function_of_seed_and_index_whose_tokens_and_labels_are_in_its_vocabulary(spec):
  task = data.task(spec)
  for index in (1, data.HELD_OUT):
    x, y = task.batch(40, 3, index)
    assert x.shape == y.shape and x.dtype == y.dtype == np.int32 and (y >= 0).any(1).all()
    assert x.min() >= 0 and x.max() < task.vocab and y.max() < task.vocab and set(y[y < 0]) <= {-100}
    again, *others = [task.batch(40, *place) for place in ((3, index), (3, index + 1), (4, index))]
    assert same((x, y), again) and (":" in spec or not any(same(x, z) for z, _ in others))

TASK_FAULTS = """
  -> name a task: mqar | mqar length=7 -> take 8 | mqar pairs=40 -> take 160 or more | mqar again=9 -> take 0 to 4
  mqar pairs=many -> not a number | copy length=3 -> not even: take 4 | mqar seed=x -> invalid literal
  niah kind=x -> take pk, n or w | niah length=74 -> take 75 or more | babi question=6 -> take 1 to 5
  babi length=323 -> take 324 or more | copy length=100000 -> takes 0 to 65536 | mqar pairs=0 -> take 1 or more
  babi length=1048577 -> takes 0 to 1048576 | mqra -> name a task: mqar | mqar vocab=8 length=32 -> take more than 32
  mqar pears=3 -> take one of seed, vocab | noisy_recall noise=0 -> leaves no noise
  selective_copying copies=200 -> take 127 or fewer | fuzzy_recall shortest=4 -> take 1 to 3
  fuzzy_recall vocab=6 -> take 7 and 18 | in_context_recall vocab=7 -> take an even number of 4
  noisy_recall vocab=18 -> take an even number of 20 | in_context_recall length=2 -> asks for nothing
  niah kind=n text=/no/such -> does not exist | compression length=1 -> nothing to compress
  niah kind=w length=128 -> take 129 or more | babi question=3 facts=2 -> take 3 or more
  babi question=4 facts=3 -> question=4: take 2"""

@cases("line,message", table(TASK_FAULTS))
def test_a_task_says_what_is_wrong_in_one_line(line, message, refused):
  assert message in refused(line, program=data.shown)

def test_two_examples_of_a_task_are_shown_with_their_settings_and_seed(run):
  shown = run("mqar pairs=2 length=16 vocab=32 seed=3", program=data.shown).out
  assert shown.count("(2 of 16 places scored)") == 2
  for tokens, labels in examples(data.mqar(2, 3, 0, pairs=2, length=16, vocab=32)):
    assert all(label < 0 or f" {token}>{label}" in shown for token, label in zip(tokens, labels))

# Scored places of a test example, as the paper's generators have them: means of 300 examples.
@cases("spec,places", table("""
  in_context_recall -> 56 | noisy_recall -> 43.6 | noisy_recall:vocab=48 -> 36.1 | noisy_recall:vocab=144 -> 16.4
  fuzzy_recall -> 4.2     | fuzzy_recall:vocab=32 -> 2.2 | selective_copying -> 16 | compression -> 32
  memorization -> 16"""))
def test_a_test_example_of_mad_scores_as_many_places_as_the_paper_s(spec, places):
  counts = (data.task(spec).batch(1200, 0, data.HELD_OUT)[1] >= 0).sum(1)
  error = counts.std() * (1 / 300 + 1 / 1200) ** 0.5     # of the difference: the figure is a mean of 300
  assert abs(counts.mean() - float(places)) <= 3 * error + 0.05                 # 0.05: the figure is rounded

@cases("settings,mean", table("again=0 -> 31 | again=3 -> 35 | again=8,noise=1 -> 43 | crowd=1 -> 39"))
def test_mqar_asks_for_every_key_once_mostly_in_front_and_the_latest_value_counts(settings, mean):
  """The mean place of a query is half way from `start` to 64 where they are not crowded."""
  task = data.task(f"mqar:vocab=128,length=64,pairs=8,{settings}")
  batch, start = task.batch(50, 0, 0), 2 * (8 + task.settings["again"])
  assert abs(np.nonzero(batch[1] >= 0)[1].mean() - int(mean)) < 1
  for tokens, labels in examples(batch):
    values, queries = tokens[1:start:2], tokens[start:]
    latest = dict(zip(tokens[:start:2], values))         # of a key that occurs twice, dict keeps the later value
    assert max(latest) < 64 <= min(values) and len(latest) == 8
    assert sorted(token for token in queries if token in latest) == sorted(latest)
    assert labels == [-100] * start + [latest.get(token, -100) for token in queries]

@cases("spec,count", table("""
  in_context_recall -> 8 | in_context_recall:vocab=32,length=64 -> 16
  noisy_recall -> 8      | noisy_recall:vocab=144,noise=0.6 -> 64   | noisy_recall:vocab=48 -> 16"""))
def test_recall_asks_for_the_value_of_every_key_seen_before_and_last_for_one_that_was(spec, count):
  """The last pair's key was seen before.  Noise comes in pairs, has tokens of its own, and is not asked for."""
  task, keys, noisy = data.task(spec), int(count), []
  for tokens, labels in examples(task.batch(100, 2, 0)):
    known, expected = dict[int, int](), list[int]()
    for key, value in zip(tokens[::2], tokens[1::2]):
      noisy.append(key >= 2 * keys)
      expected += [known.get(key, -100), -100]
      if noisy[-1]: assert value >= 2 * keys
      else: assert key < keys <= known.setdefault(key, value) == value < 2 * keys
    assert labels == expected and labels[-2] == tokens[-1]
  assert abs(np.mean(noisy) - task.settings["noise"]) < 0.05

@cases("index", [0, data.HELD_OUT])
@cases("settings", ["shortest=1", "shortest=3", "vocab=32,length=401", "vocab=7,length=18"])
def test_fuzzy_recall_asks_for_the_values_of_motifs_seen_before(settings, index):
  task, probes, lengths = data.task(f"fuzzy_recall:{settings}"), list[float](), (Counter[int](), Counter[int]())
  shortest, half, padding = 3 if index else task.settings["shortest"], chr((task.vocab - 1) // 2), chr(task.vocab - 1)
  pair = re.compile(f"([^{half}-{padding}]+)([{half}-{padding}]+)")
  for tokens, labels in examples(task.batch(100, 3, index)):
    text, known = "".join(map(chr, tokens)).lstrip(padding), dict[str, str]()
    pairs, expected = pair.findall(text), [-100] * (len(tokens) - len(text))
    assert padding not in text and len(expected) >= 6 and "".join(map("".join, pairs)) == text
    for key, value in pairs:
      assert len(key) <= 3 >= len(value) and len(set(key + value)) == len(key + value)
      expected += [-100] * len(key) + [ord(token) if key in known else -100 for token in value]
      assert known.setdefault(key, value) == value
    assert labels == [*expected[1:], -100] and labels[-2] == tokens[-1]         # one place before; the last pair's too
    probes.append([key for key, _ in pairs].index(pairs[-1][0]) / len(pairs))
    for count, motifs in zip(lengths, zip(*pairs[:-1])): count.update(map(len, motifs))
  if "vocab" in settings: return
  assert max(probes) > 0.8 and (index == 0 or 0.35 < np.mean(probes) < 0.55)    # a drawn pair comes again
  for count, least in zip(lengths, (shortest, 1)):       # as many motifs of each length
    assert set(count) == {*range(least, 4)} and max(count.values()) < 1.25 * min(count.values())

@cases("vocab,length,copies", [(16, 256, 16), (64, 64, 31), (3, 3, 1)])
def test_selective_copying_has_one_copy_token_and_labels_under_blanks(vocab, length, copies):
  x, y = data.selective_copying(50, 0, 0, vocab, length, copies)
  start, blank, copy = length - copies, vocab - 2, vocab - 1
  for tokens, labels in examples((x, y)):
    assert tokens.index(copy) == start - 1 and tokens[start:] == [blank] * copies
    assert labels == [-100] * start + [token for token in tokens[:start] if token < blank]
  if length == 256: assert abs(np.nonzero(x[:, :239] < 14)[1].mean() - 119) < 8        # drawn places, everywhere

def test_copies_and_compressed_tokens_come_in_order_and_memorized_values_are_the_same_in_all_runs():
  for tokens, labels in examples(data.copy(3, 0, 0, length=10)):
    assert tokens[5:] == [0, *tokens[:4]] and labels[5:] == tokens[:5]
  x, y = data.compression(100, 0, 0)                     # every token, and the summary at the end
  assert same(x, y) and (x[:, -1] == 15).all() and set(x[:, :-1].flat) == set(range(15))
  x, y = np.concatenate([data.memorization(400, *place) for place in ((7, 0), (8, 3), (0, data.HELD_OUT))], axis=1)
  assert (x[:, 1::2] == 255).all() and (y[:, ::2] == -100).all()
  keys, values = zip(*sorted(set(zip(x[:, ::2].flat, y[:, 1::2].flat))))
  assert keys == tuple(range(127)) and sorted(values) == list(range(127, 254)) != list(values)    # shuffled

def spoken(length, batch):
  """Prompts of one length and answers of a task in bytes; the tokens continue with the answer and its newline."""
  n, result = data.prompt_length(batch[1]), []
  for tokens, labels in examples(batch):
    prompt, rest = bytes(tokens[:n]).decode(errors="replace"), bytes(tokens[n:]).decode()
    answer = bytes(label for label in labels if label >= 0).decode()
    assert len(tokens) == length and answer.endswith("\n") and rest == answer.ljust(length - n + 1, "\n")[:-1]
    assert labels == [-100] * (n - 1) + [*answer.encode()] + [-100] * (length + 1 - n - len(answer))
    result.append((prompt, answer[:-1]))
  return result

@cases("kind,value", table("pk -> [0-9]{7} | n -> [0-9]{7} | w -> [0-9a-f]{8}(-[0-9a-f]{4}){3}.{13}"))
@cases("length", [133, 512, 2048])
def test_niah_hides_the_value_once_beside_its_key(kind, value, length):
  depths = []
  for prompt, answer in spoken(length, data.niah(200, 1, 0, kind, length)):
    question = prompt.splitlines()[-1]
    assert re.fullmatch(r"The \w+ of \w{5}-\w{5} is ", question) and prompt.endswith(f"\n{question}")
    assert re.fullmatch(value, answer) and f"\n{question}{answer}.\n" in f"\n{prompt}"
    assert prompt.count(question) == 2 and prompt.count(answer) == 1
    depths.append(prompt.index(answer) / (length - 2 * len(question) - 2 * len(answer)))
  if length == 2048: assert min(np.histogram(depths, 4, (0, 1.1))[0]) > 25

def test_a_haystack_is_any_text_of_bytes_and_no_token_ids():
  written("page.txt", b"It was late. Nobody came! " * 400)                      # one line: needles go between sentences
  hidden = spoken(400, data.niah(20, 0, 0, "n", 400, "page.txt"))
  assert all(re.search(r"(^|[.!] |\n)The number", prompt) for prompt, _ in hidden)
  written("digits.txt", numbers(48, 58, 200_000, np.uint8))
  hidden = spoken(200_000, data.niah(40, 0, 0, "n", 200_000, "digits.txt"))
  assert all(prompt.count(answer) == 1 for prompt, answer in hidden)
  with raises("10,400 bytes and 19,924 are needed"): data.niah(1, 0, 0, "n", 19998, "page.txt")
  written("t.bin", numbers(0, 999, 999, "<u2"))
  with raises("holds token ids"): data.babi(1, 0, 0, text="t.bin")

FACT = re.compile(r"(\w+) (went to|took|dropped|gave) the (\w+)(?: to (\w+))?\.|The (\w+) is (\w+) of the (\w+)\.")
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}

def solved(prompt):
  """The answer to the question in a story's last line, by all facts from the first to the last."""
  room, holder, rooms, answers = dict[str, str](), dict[str, str](), defaultdict[str, list](list), dict[str, str]()
  for who, verb, what, receiver, here, direction, there in FACT.findall(prompt):
    if verb == "went to": room[who] = what
    if verb == "took": holder[what] = who
    if verb == "dropped": del holder[what]
    for thing, person in holder.items():
      if rooms[thing][-1:] != [room[person]]: rooms[thing].append(room[person])
    if verb == "gave":
      answers |= {f"Who last gave the {what} to {receiver}?": who, f"What did {who} last give to {receiver}?": what,
                  f"To whom did {who} last give the {what}?": receiver}
    for a, towards, b in ((here, direction, there), (there, OPPOSITE.get(direction), here)):
      answers |= {f"What is {towards} of the {b}?": a, f"What is the {a} {towards} of?": b}
  answers |= {f"Where is {person}?": place for person, place in room.items()}
  for thing, places in rooms.items():
    answers[f"Where is the {thing}?"] = places[-1]
    answers |= {f"Where was the {thing} before it last came to the {b}?": a for a, b in itertools.pairwise(places)}
  return answers[prompt.splitlines()[-1].strip()]

@cases("question,shortest", [(1, 324), (2, 376), (3, 376), (4, 136), (5, 285)])
def test_a_solver_that_reads_the_story_agrees_with_babi(question, shortest):
  usual, _, longest = data.STORIES[question]
  for length, facts, text in ((512, usual, "filler"), (1500, usual, "python"), (shortest, usual, "filler"),
                              (3000, 2 if question == 4 else 60, "filler")):
    stories = spoken(length, data.babi(100, 2, 0, question, length, text, facts))
    assert all(solved(prompt) == answer for prompt, answer in stories)
    answers = {answer for _, answer in stories}
    assert answers <= set(data.BABI_LABELS[question]) and len(answers) > 4
    told = [[fact.group() for fact in FACT.finditer(prompt)] for prompt, _ in stories]
    assert {len(story) for story in told} == {facts}
  assert max(len(fact) for fact in sum(told, [])) + 1 == longest                # these two make the least length
  assert max(len(prompt.splitlines()[-1]) for prompt, _ in stories) <= 55

def test_a_story_of_a_million_bytes_is_made_in_a_moment_and_solved():
  task, start = data.task("babi:question=2,length=1000000"), time.process_time()
  (prompt, answer), = spoken(1_000_000, task.batch(1, 0, data.HELD_OUT))
  assert time.process_time() - start < 2 and solved(prompt) == answer and task.variants() == [{}]
  assert data.task("babi:length=262144").variants() == [{}, {"length": 524288}, {"length": 1048576}]

# *** files of weights ***

def rewritten(content, **changed):
  """A file of weights as another tool writes it again, with changed entries of the metadata; None leaves one out."""
  size = 8 + int.from_bytes(content[:8], "little")
  header = json.loads(content[8:size])
  meta = header.pop("__metadata__") | changed
  text = json.dumps(header | {"__metadata__": {name: x for name, x in meta.items() if x is not None}}).encode()
  return len(text).to_bytes(8, "little") + text + content[size:]

def test_a_file_is_refused_whatever_bit_of_it_is_flipped_and_whoever_wrote_it():
  tensors = {"a": Tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), "b": Tensor([7.0])}
  data.save_file("w", tensors, {"step": 3, "config": {"dim": 8}})
  safe_save(tensors, "theirs")
  good, theirs = Path("w").read_bytes(), Path("theirs").read_bytes()
  def flipped(place): return good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1:]
  def refuses(message, *contents):
    for content in contents:
      with raises(f"^bad .*({message}).*$"): data.read_file(written("bad", content))
  refuses("is damaged|is not a checkpoint|has the format", *map(flipped, range(len(good))))
  refuses("is damaged|is not a checkpoint", *[good[:place] for place in (0, 4, 8, 100, -4, -1)])
  whole = rewritten(good, sha256=None)                   # what can be told without a checksum
  refuses("is damaged", whole[:-1], whole + b"x", good + b"\0")
  refuses("is damaged, its checksum does not match", rewritten(good))
  refuses("is not a checkpoint of this", theirs, rewritten(good, format="pt"))
  refuses("format atlas-1, not atlas-2", rewritten(good, format="atlas-1"))
  refuses("is not a checkpoint", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04echo\x85R.")    # a pickle
  with raises("cannot be read"): atlas.load(".")

# *** the command line ***

BAD_FILES = {"empty.txt": b"", "short.txt": b"x" * 100, "t.bin": GPT2 + bytes(1000), "cut.bin": GPT2 + bytes(998),
             "header.bin": GPT2[:900], "later.bin": shard(20240520, 2, 500, 1000)}
BAD = """
  steps -> is not key=value | --steps 3 -> write steps=... | =3 -> write 3=... | chunks=8 -> did you mean chunk
  tasks=mqar -> did you mean task | steps=many -> not a whole number | forget=maybe -> true or false | lr=nan -> lr=nan
  batch=0 -> 1 or more | mode=training -> did you mean train | preset=atlass -> did you mean atlas
  size=big -> take one of tiny | window=0 -> is too small | layers=2000 -> take 1024 or less
  mlp_ratio=inf -> take 1024 or less | preset=dot anchors=0 -> 1 or more | batch=999 devices=999 -> 64 or less
  mode=bench devices=2 -> for training | task=mqar:seed=1 -> give seed=1 | task=mqar length=63 -> take 64
  task=niah vocab=99 -> made of bytes | data=/nowhere -> does not exist | length=9000000 -> too short
  vocab=50 -> outside vocab=50 | mode=eval -> has no checkpoint | mode=plot -> no log.csv
  init_from=/nowhere -> does not exist | out=/dev/null/x -> is a file | data=/dev/zero -> is neither a file
  data=empty.txt -> is empty | data=short.txt -> too short | data=header.bin -> copy it again
  data=cut.bin -> copy it again | data=later.bin -> version 2, not 1 | data=t.bin length=8 -> give vocab=
  data=t.bin length=8 vocab=9 prompt=abc -> token ids | steps=3000000000 -> take 2147483647 or less
  mixer=mix -> take one of memory, attention | dtype=half -> take one of float32, bfloat16
  backend=fast -> take one of auto, ops, fused | muon_every=3 -> does not divide chunk=32
  preset=dot memory=gated -> two first layers | mixer=mac -> attn_window=0 leaves mac without segments
  preset=atlas_mag key_dim=5 -> is odd | degree=9 key_dim=64 -> features, more than 65,536
  preset=dot backend=fused -> take ops or auto | preset=dot optimizer=muon -> no matrix to orthogonalise
  batch=6 accum=3 devices=4 -> batch/accum=2 | batch=2147483646 accum=4 -> take one of 1, 2, 3,
  mode=bench presets=atlas,titan -> did you mean titans | mode=bench lengths=9999999999 -> is not a number of tokens
  task=mqar:length=64 length=32 -> contradicts | task=mqar vocab=20 -> is too small | CONST_LR=1 -> changes the types
  task=mqar data=python -> give one of them | accum=3 -> batch=4: take one of 1, 2, 4
  devices=3 -> batch/accum=4: take one of 1, 2, 4 | DEFAULT_FLOAT=HALF -> changes the types
  DEFAULT_INT=INT64 -> changes the types | OPTIM_DTYPE=bfloat16 -> changes the types"""

@cases("line,message", table(BAD))
def test_bad_input_gets_one_line_that_names_it(line, message, refused):
  for name, content in BAD_FILES.items(): written(name, content)
  assert message in refused(line) and set(os.listdir()) == set(BAD_FILES)

def test_the_first_fault_in_the_stated_order_is_reported(refused):
  faults = ["oops", "nokey=1", "steps=x", "muon_every=3", "data=/nowhere", "out=/dev/null/x"]
  for i, fault in enumerate(faults): assert re.match(f"error: '?{fault.split('=')[0]}", refused(" ".join(faults[i:])))

def test_a_precision_and_devices_that_are_not_there_are_named(refused):
  message = f"dtype=bfloat16 does not run on {Device.DEFAULT} (no such type): take dtype=float32"
  with patch.object(atlas, "linear", side_effect=NotImplementedError("no such type")):
    assert refused("dtype=bfloat16 steps=0") == f"error: {message}"
  with patch.object(train, "device_names", return_value=(Device.DEFAULT, "NOWHERE:1")):
    assert re.match("error: devices=2: NOWHERE:1 cannot be used.* take devices=1$", refused("devices=2 steps=0"))

@pytest.mark.skipif(Device.DEFAULT != "CPU", reason="clang is the CPU device's compiler")
@cases("clang", ["/nonexistent", *marked(runs, "/bin/false")])
def test_no_usable_device_says_how_to_get_clang(clang):
  message, = process("", 2, CC=clang, DEV="CPU").strip().splitlines()
  assert "pip install '.[cpu]'" in message and not os.listdir()

def test_help_lists_every_key(run):
  shown = run("--help").out
  for name in train.Run.__annotations__ | atlas.Config.__annotations__: assert f"  {name}=" in shown

@cases("line,setting", table("""
  preset=titans -> window=1 | preset=titans window=3 -> window=3 | window=3 preset=titans -> window=3
  seed=1 -> data=python | chunk=32 -> muon_every=4 | chunk=6 -> muon_every=2 | chunk=5 -> muon_every=1
  size=170m -> dim=768 | dim=64 size=170m preset=titans -> dim=64 | preset=titans size=170m dim=64 -> dim=64
  length=300 -> horizon=300 | length=300 horizon=20 -> horizon=20 | size=170m window=3 -> window=3
  length=16 -> horizon=128 | task=copy:length=400 -> horizon=400 | DEFAULT_FLOAT=float32 -> mode=train"""))
def test_explicit_keys_win_over_size_over_preset_in_any_order_and_the_horizon_covers_the_length(line, setting, run):
  assert f" {setting} " in run(f"{line} steps=0").out

def test_parameter_counts_match_what_init_makes_and_an_unknown_field_is_named():
  for cfg in (small("dot", memory="linear", anchors=0), *map(small, PRESETS)):
    assert atlas.parts(cfg)["total"] == sum(p.numel() for p in get_state_dict(atlas.init(cfg)).values())
  with raises("windows is .* did you mean window"): atlas.preset("titans", windows=3)

def test_the_commands_of_readme_and_results_are_accepted(folder, capfd):
  """Each is checked to its last setting, and none takes a step."""
  texts = [Path(shutil.copy(HERE / name, folder)).read_text() for name in ("README.md", "RESULTS.md")]
  documents = "\n".join(texts).replace("\\\n", " ")
  Path("assets").symlink_to(HERE / "assets")
  written("lines.jsonl", documents.split("```json\n")[1].split("```")[0].encode())
  kinds = [kind for kind, _ in evaluate.json_lines(Path("lines.jsonl"))[0]]
  commands = re.findall(r"\bpython3? (train|data|experiments)\.py(?! TASK| NAME|[^`\n]*\.\.\.)([^`\n]*)", documents)
  assert kinds == ["choice", "choice", "recall", "last"] and len(commands) > 20
  added = re.findall(r'^\+ *"(\w+)": ', documents, re.M)  # rows that README.md adds to the rule: not there before
  for program, line in commands:
    words = shlex.split(line, comments=True)
    if program == "experiments": assert words[0] in experiments.EXPERIMENTS, line
    elif program == "data": assert data.shown(words) == 0, line
    elif not any(word.partition("=")[2] in added for word in words):
      code = train.main([*words, "steps=0"])
      assert code == 0 or re.search("has no (checkpoint|log)", capfd.readouterr().err), line

# *** runs: ten steps, and what is made of them ***

TEN = f"{TINY} preset=gated_deltanet steps=10 batch=2 length=16 eval_every=5 tokens=1 warmup=2 lr=0.01 save_every=2"
FIRST_LOSSES = "5.927703 5.896790 6.257471 5.841913 5.594658 5.670399 5.312394 5.674078 5.416502 5.553526"

@pytest.fixture(scope="module")
def ten(tmp_path_factory):
  """The command of ten steps on generated text, and the folder that it wrote."""
  text, out = [tmp_path_factory.mktemp("ten") / name for name in ("text.txt", "out")]
  text.write_bytes(bytes(rng(0).integers(97, 105, 4000, dtype=np.uint8)))
  command = f"{TEN} data={text}"
  assert train.main([*command.split(), f"out={out}"]) == 0
  return command, out

@pytest.fixture
def command(ten, folder):
  """The command, and a copy of its folder as the default `out`."""
  shutil.copytree(ten[1], folder / "out")
  return ten[0]

def log_rows(out): return [row[:7] for row in csv.reader((Path(out) / "log.csv").open())]       # without times
def newest(out="out"): return train.checkpoints(Path(out))[-1]

def result(out):
  """What a run ends with: its tensors and its log."""
  tensors = data.read_file(newest(out)).tensors
  return {name: t.numpy().tobytes() for name, t in tensors.items()}, log_rows(out)

def test_the_first_losses_are_these_and_the_last_two_checkpoints_are_kept(ten):
  losses = [float(row[2]) for row in log_rows(ten[1])[1:]]
  assert losses == pytest.approx([*map(float, FIRST_LOSSES.split())], rel=1e-4)       # rounding differs by device
  assert [path.name for path in train.checkpoints(ten[1])] == ["step_00000008.safetensors", "step_00000010.safetensors"]

def at_step(step, act):
  """A context in which `act` is called once, before the batch of a step is made."""
  acts, original = {step: act}, data.batch
  def batch(*args):
    if args[-1] in acts: acts.pop(args[-1])()
    return original(*args)
  return patch.object(data, "batch", batch)

@cases("name", ["SIGINT", *marked(runs, "SIGTERM", "SIGHUP")])
def test_a_stopped_run_continues_bit_for_bit_and_a_fresh_one_loses_nothing(name, ten, command, run):
  number = getattr(signal, name)
  signal.signal(number, signal.default_int_handler)      # nohup has SIGHUP ignored
  with at_step(4, lambda: signal.raise_signal(number)): out, error = run(command)
  assert "stopping after this step" in error and "stopped at step 5, saved" in out
  assert result("out.1") == result(ten[1])               # the earlier run was moved aside
  with Path("out/log.csv").open("a") as log: log.write("6,0,9,,9,9,9,9,9\n")    # a row after the checkpoint: a crash
  run(f"{command} resume=1")
  assert result("out") == result(ten[1])

def test_a_run_on_two_cores_continues_on_one_to_the_same_end(ten, command, run, monkeypatch):
  monkeypatch.setattr(kernels, "HAND_OVER", 0.0)         # even the smallest kernel is handed to threads
  with at_step(4, lambda: signal.raise_signal(signal.SIGINT)):
    assert "stopped at step 5, saved" in run(f"{command} cores=2").out
  run(f"{command} cores=1 resume=1")
  assert result("out") == result(ten[1])

def test_a_stop_while_compiling_takes_effect_at_once_and_loses_nothing(ten, run, monkeypatch):
  monkeypatch.setattr(evaluate, "predictions", lambda *_: signal.raise_signal(signal.SIGTERM))
  out, error = run(f"{ten[0]} cache=0")
  assert "stopping" in error and "stopped while compiling" in out
  assert not train.checkpoints(Path("out")) and signal.getsignal(signal.SIGINT) is signal.default_int_handler

@cases("place,name,message", [
  (train, "resolve", "stopped at once"), (train, "train", "stopped at once"),
  (evaluate.HeldOut, "validate", "stopped at once: resume=1 continues from out/step_00000005.safetensors")])
def test_an_interrupt_ends_in_one_line_and_loses_no_step(place, name, message, ten, run, refused):
  with patch.object(place, name, side_effect=KeyboardInterrupt):                # a second Ctrl-C
    assert refused(f"{ten[0]} save_every=5", 1) == message
  run(f"{ten[0]} resume=1 save_every=5")
  assert log_rows("out") == log_rows(ten[1])             # with the row that was not validated

def test_a_run_in_another_thread_than_the_first_one_ends_well(ten, monkeypatch):
  monkeypatch.setattr(helpers.CACHELEVEL, "value", helpers.CACHELEVEL.value)
  for _ in range(2):
    with ThreadPoolExecutor(1) as pool: assert pool.submit(train.main, [*ten[0].split(), "steps=0"]).result() == 0

def test_a_checkpoint_is_sampled_by_its_seed_and_evaluated_by_position_and_on_named_text(command, run):
  first, again, other = [run(f"mode=sample prompt=ab tokens=12 seed={n}").out.split("---")[2] for n in (4, 4, 5)]
  assert first == again != other and first.startswith("\nab")
  shown = run("mode=eval tokens=320 horizon=9").out      # no weight depends on the horizon
  assert re.search(r"validation loss \d\.\d+ nats, \d\.\d+ bits per byte", shown) and "beyond, to 32" in shown
  for text, line in ((b"abcdefgh" * 5 + b"!", "32 of 41 bytes read, in windows of 32"),
                     (b"abc", "2 of 3 bytes read, in windows of 2")):
    assert line in run(f"mode=eval data={written('t.txt', text)}").out
  with raises("leave 3 .* give 4 for length=3"): data.load("t.txt", 256, 3, parts=1)

CHECKPOINT = "out/step_00000010.safetensors"

def test_what_contradicts_a_checkpoint_or_its_text_and_a_second_run_in_its_folder_are_refused(command, refused):
  for line, message in table(f"""
      dim=32 resume=1 -> dim=32 contradicts       | lr=3 resume=1 -> lr=3.0 contradicts
      horizon=9 resume=1 -> horizon=9 contradicts | dim=24 init_from={CHECKPOINT} -> has shape"""):
    assert message in refused(line) and os.listdir() == ["out"]
  with train.held(Path("out")):
    for more in ("", "resume=1 steps=12"): assert "is in use by another run" in refused(f"{command} {more}")
  assert os.listdir() == ["out"]
  path = Path(command.split("data=")[1])
  text = path.read_bytes()
  path.write_bytes(b"z" + text[1:])                      # another text of the same length
  try: assert "has changed since" in refused("resume=1 steps=19")
  finally: path.write_bytes(text)

def test_a_data_file_that_changes_ends_a_run_in_one_line_with_its_steps_saved(command, refused, monkeypatch):
  changed = Mock(side_effect=ValueError("data=x was changed while it is read: copy it, and train on the copy"))
  with at_step(12, lambda: monkeypatch.setattr(data, "unchanged", changed)):
    error = refused(f"{command} resume=1 steps=20 save_every=0", 1)
  assert "was changed" in error and str(newest()) in error and newest().name == "step_00000013.safetensors"

def test_init_from_brings_its_settings_and_names_those_that_contradict(ten, run, refused):
  cfg, path = small("titans", vocab=256, chunk=8, horizon=300), Path("w.safetensors")
  atlas.save(path, get_state_dict(atlas.init(cfg)), {"config": dataclasses.asdict(cfg)})
  line = f"data={ten[0].split('data=')[1]} length=16 steps=0 init_from={path}"
  shown = run(line).out
  assert {f"{name}={x}" for name, x in dataclasses.asdict(cfg).items()} <= set(shown.split()) and "warning" not in shown
  shown = run(f"{line} chunk=4 preset=gated_deltanet memory=mlp momentum=1").out
  assert " chunk=4 " in shown and " momentum=True " in shown and shown.count("warning") == 1
  assert f"chunk=4 here, and {path} was made with chunk=8" in shown
  refused(f"{line} preset=linear_attention")

def test_a_checkpoint_without_our_checksum_is_named_and_taken_and_a_damaged_one_is_not(ten, command, run, refused):
  (older, newer), line = train.checkpoints(Path("out")), f"{command} resume=1"
  assert not run(f"{line} steps=0").err
  unsigned = rewritten(newer.read_bytes(), sha256=None)
  newer.write_bytes(unsigned)
  assert f"{newer} is unsigned" in run(f"{line} steps=0").err and result("out") == result(ten[1])
  newer.write_bytes(unsigned[:-5])
  warning = run(f"{line} steps=0").err
  assert f"{newer} is damaged" in warning and f"{older} is taken instead" in warning
  run(line)
  assert result("out") == result(ten[1])
  assert set(os.listdir("out")) == {"log.csv", "positions.csv", older.name, newer.name, f"{newer.stem}.damaged"}
  for path in (older, newer): path.write_bytes(b"")
  assert f"{newer} is not a checkpoint" in refused(line)
  assert "data=/nowhere" in refused("mode=eval data=/nowhere")                  # the fault of data comes first

def test_an_exported_file_is_loaded_with_its_settings_and_can_be_trained_on(command, run, refused):
  path = Path("out/weights.safetensors")
  assert str(path) in run("mode=export").out
  saved = data.read_file(newest()).tensors
  for file in (path, newest()):
    cfg, params = atlas.load(file)
    weights = get_state_dict(params)
    assert cfg == small("gated_deltanet", vocab=256) and list(weights) == list(atlas.layout(cfg))
    for name, t in weights.items(): assert same(t.numpy(), saved[f"weights.{name}"].numpy())
    run(f"{command} out=new init_from={file} steps=0")
  assert safe_load(path).keys() == weights.keys()        # anything that reads safetensors reads these names
  path.rename("step_00000011.safetensors")               # weights alone are nothing to continue
  assert "holds weights and no run" in refused("resume=1 out=.")

def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(command, refused, monkeypatch):
  """The step whose loss is not finite is named.  The checkpoint whose weights gave that loss is removed."""
  monkeypatch.setattr(train, "rate", lambda run, step: 1e-3 if step < 3 else 1e30)
  message = refused(f"{command} out=new save_every=1 eval_every=0", 1)
  step = int(re.findall(r"at step (\d+) is not finite", message)[0])
  assert step >= 5 and data.read_file(newest("new")).meta["step"] == step - 2 and str(newest("new")) in message
  assert len(log_rows("new")) == step                    # the header and every step before

FORMS = {"transformer++": "softmax", "deltanet": "fused" if Device.DEFAULT == "CPU" else "ops"}

@cases("preset", ["transformer++", *marked(runs, "deltanet")])
def test_bench_prints_and_writes_a_row_per_preset_and_length(preset, run):
  line = f"mode=bench {TINY} batch=2 lengths=16,100000000 presets={preset}"
  run(f"{line},titans steps=0")
  assert not Path("out").exists()
  run(line)
  measured, too_long = csv.DictReader(Path("out/bench.csv").open())
  assert tuple(measured) == train.COLUMNS and all(measured.values()) and float(measured["tok_s"]) > 0
  assert (measured["backend"], measured["length"], too_long["length"]) == (FORMS[preset], "16", "100000000")
  assert too_long["params"] == "does not fit" and not any(too_long[name] for name in train.COLUMNS[5:])
  memory, products, rest = [float(measured[name] or "nan") for name in ("memory", "products", "rest")]
  if Device.DEFAULT == "CPU":
    assert memory + products + rest == pytest.approx(1, abs=0.002) and products > 0 and rest > 0
    assert (memory > 0) == (preset == "deltanet") and int(measured["cores"]) >= 1

def test_a_task_is_trained_on_until_it_is_solved_evaluated_beyond_and_drawn(run, refused, monkeypatch):
  monkeypatch.setitem(data.BEYOND, "mqar", [dict(pairs=2, again=2, length=2)])
  monkeypatch.setattr(train, "SOLVED", 0.0)              # the first look at held-out examples ends the run
  task = "task=mqar:pairs=2 vocab=40 length=12 batch=2 tokens=64"
  shown = run(f"{TINY} preset=transformer++ {task} steps=6 eval_every=3").out
  assert "done early" in shown and data.read_file(newest()).meta["step"] == 3
  scores = list(csv.DictReader(Path("out/accuracy.csv").open()))
  assert [row["setting"] for row in scores] == ["as given", "pairs=4,again=0,length=24"]
  assert all(0 <= float(row["micro"]) <= 1 for row in scores)
  assert run("mode=eval tokens=64").out.splitlines()[-2:] == shown.splitlines()[-3:-1]
  assert "99 tokens" in refused("mode=eval task=copy:vocab=99") and "contradicts" in refused("resume=1 task=copy")
  if importlib.util.find_spec("matplotlib"):
    run("mode=plot")
    assert Path("out/log.png").stat().st_size > 5_000
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  assert "pip install '.[plot]'" in refused("mode=plot")

def test_a_task_without_validation_is_never_scored_and_compression_is_answered_from_one_state(run, refused):
  line = f"{TINY} preset=deltanet task=compression:vocab=5 length=8 batch=2 tokens=64 eval_every=0"
  assert "as given" not in run(f"{line} steps=2").out and not Path("out/accuracy.csv").exists()
  assert "as given" in run("mode=eval tokens=64").out
  run(f"{line} steps=3 resume=1")                        # by the compiled step of the cache
  for other in ("copy:vocab=5", "compression:vocab=5,length=9"):
    assert "for its own length" in refused(f"mode=eval task={other}")
  job = train.resolve(*train.parse(["mode=eval"]))
  params, (x, _) = job.params or {}, data.compression(2, 0, 0, vocab=5, length=8)
  def logits(order):
    decoder = params["decoder"] | {"position": params["decoder"]["position"][order]}
    return evaluate.predictions(params | {"decoder": decoder}, job.cfg, Tensor(x))[0].numpy()
  forwards, backwards = logits(slice(None)), logits(slice(None, None, -1))
  assert forwards.shape == (2, 8, 5) and np.allclose(backwards[:, ::-1], forwards, atol=1e-6)

# *** what a trained model is worth ***

def test_a_score_counts_places_labels_examples_and_answers():
  cfg, task = small("deltanet", vocab=40), data.task("in_context_recall:vocab=8,length=16")
  params = atlas.init(cfg)
  score = evaluate.scorer(params, cfg, task, 4, 0)(64, {})
  x, y = np.concatenate([task.batch(4, 0, data.HELD_OUT + i) for i in range(8)], axis=1)
  hit = atlas.forward(params, cfg, Tensor(x))[0].argmax(-1).numpy() == y
  assert score["micro"] == pytest.approx(hit[y >= 0].mean())
  assert score["macro"] == pytest.approx(np.mean([hit[y == label].mean() for label in np.unique(y[y >= 0])]))
  assert score["exact"] == pytest.approx((hit | (y < 0)).all(1).mean())

@cases("text", ["the hall.", "hall or study", "hall or attic", "", "attic"])
def test_an_answer_counts_if_it_names_the_target_alone_beside_what_the_question_names(text):
  story = b"Ada is in the study.\nIs Ada in the study? "
  assert evaluate.judged(data.task("babi"), story, text, "hall") == (text in ("the hall.", "hall or study"))
  assert evaluate.judged(data.task("niah"), b"", text.upper(), "hall") == ("hall" in text)

@cases("line", ["--help", "mode=sample tokens=999999999 temperature=5 top_k=0"])
def test_a_pipe_that_is_closed_ends_a_command_and_in_no_traceback(line, command):
  words = f"set -o pipefail; {sys.executable} -u {train.__file__} {line} | head -c 40 >/dev/null"
  done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
  assert done.returncode == 0 and not re.search("Traceback|Broken|Exception", done.stderr)

def test_a_prompt_comes_from_a_file():
  def ids(prompt, is_bytes=True): return evaluate.prompt_ids(prompt, small("deltanet", vocab=256), is_bytes)
  for name, content in (("bytes", b"\xff" * 200_000), ("ids", b"3,4\n"), ("empty", b"")): written(name, content)
  assert ids("@bytes") == [255] * 200_000 and ids("@@a") == [64, 97] and ids("@ids", is_bytes=False) == [3, 4]
  for prompt, message in table("@no -> cannot be read | @ -> cannot be read | @empty -> is empty"):
    with raises(message): ids(prompt)

@cases("name", ["deltanet", *marked(runs, "titans", "titans_mac", "transformer++")])
def test_likelihoods_are_those_of_reading_each_row_at_once_whatever_pieces_it_is_read_in(name, monkeypatch):
  monkeypatch.setattr(evaluate, "PIECE", 30)
  cfg = small(name, vocab=256, **windows(name, 24))
  params = atlas.init(cfg, 2)
  rows = [(b"It is", b" abc"), (b"a", b"b" * 70), (b"x", b"?"), (b"", b"z"), (b"ab" * 20, b"c" * 40)]
  padded = Tensor([[*((before or b"\n") + after).ljust(90)] for before, after in rows])
  all_scores = atlas.forward(params, cfg, padded)[0].log_softmax(-1).numpy()
  rows[2] = b"x", bytes([all_scores[2, 0].argmax()])     # its likeliest byte
  measured = evaluate.likelihoods(params, cfg, rows, 2)
  for (before, after), scores, (nats, greedy) in zip(rows, all_scores, measured, strict=True):
    n, ids = len(before or b"\n"), [*after]
    scores = scores[n - 1:n - 1 + len(ids)]
    assert nats == pytest.approx(scores[range(len(ids)), ids].sum(), rel=1e-4)
    assert greedy == same(scores.argmax(-1), ids)

QUESTIONS = b"""{"context": "It is ", "choices": ["abc", "zz", "q"], "answer": 1}
{"context": "So", "choices": ["he", "the other one"], "suffix": " was here", "answer": "he"}

{"context": "x", "question": "y?", "answers": ["The Hall", "no"]}
{"text": "one two three"}
"""

def test_questions_are_scored_by_likelihood_by_what_is_said_and_by_the_last_word(capsys, monkeypatch):
  """The model is replaced.  By character `zz` is the likeliest choice of the first line, and `q` as a whole."""
  scores = {(b"It is", b" abc"): (-6.0, False), (b"It is", b" zz"): (-2.5, False), (b"It is", b" q"): (-2.0, True),
            (b"So he", b" was here"): (-1.0, False), (b"So the other one", b" was here"): (-2.0, False),
            (b"one two", b" three"): (-1.5, True)}
  monkeypatch.setattr(evaluate, "likelihoods", lambda params, cfg, rows, batch: [scores[row] for row in rows])
  monkeypatch.setattr(evaluate, "speaker", lambda *_: lambda x, n: ["in THE hall" * (x.tobytes() == b"x\ny? ")])
  evaluate.evaluate_lines({}, small("deltanet"), *evaluate.json_lines(Path(written("lines.jsonl", QUESTIONS))), 2)
  shown = capsys.readouterr().out
  assert "multiple choice: 2 lines, acc 0.5000, acc_norm 1.0000\n" in shown
  assert "recall: 1 lines, contains 1.0000\nlast word: 1 lines, acc 1.0000, perplexity 4.482\n" in shown

@cases("line,message", [("[" * 100_000, "is not JSON"), ("\xff", "is not JSON"), *table("""
  {"x" -> is not JSON | [1] -> is not an object       | {"text": "one"} -> a text of two words
  {"context": "", "choices": ["a"], "answer": 0}      -> choices
  {"context": "", "choices": ["a", "b"], "answer": 2} -> answer
  {"context": "", "question": "q", "answers": []}     -> answers
  {"choices": ["a", "b"], "answer": 0}                -> context""")])
def test_a_malformed_line_is_named_and_left_out_only_when_asked(line, message):
  path = Path(written("lines.jsonl", b'{"text": "one two"}\n\n' + line.encode("latin1") + b'\n{"text": "three four"}'))
  with raises(f"line 3 .*{message}.*skip_bad=1"): evaluate.json_lines(path)
  lines, skipped = evaluate.json_lines(path, skip_bad=True)
  assert [row["text"] for _, row in lines] == ["one two", "three four"] and skipped == 1

# *** -m runs: drawn bad input; settings are those of the dataclasses, values mostly of their kind ***

WORDS = """ -1 1e9 1000000000 1e30 nan inf 1e308 1e-320 = , \0 \ud800 \u2028 \u0663 ~ --help a\nb"""
HOSTILE = [*WORDS.split(" "), "9" * 5000, "x/" * 3000, *map(chr, rng(0).integers(0, 0x110000, 50))]
PLACES = ["a.txt", "out", "empty", "nowhere", "a.txt/x", CHECKPOINT, ".", "..", "/dev/null", "/dev/zero", "loop"]
KINDS = {int: [*range(-1, 41), 64, 256, 4096, 65536, 10 ** 6, 2 ** 31 - 1], bool: [True, False], str: PLACES,
         float: [0, 0.01, 0.5, 1, 4, -0.1, 1e-320, 1e20, math.inf, math.nan]}
TASKS = [*data.TASKS, *SPECIAL.split(), *[line for line, _ in table(TASK_FAULTS)]]
NAMES = atlas.CHOICES | {
  "mode": train.MODES, "preset": [*atlas.PRESETS], "size": [*atlas.SIZES], "presets": ["atlas,dot", "swa", "atlas,"],
  "lengths": ["8,16", "8,,9", "0"], "task": [re.sub("[: ]", ":", task, count=1).replace(" ", ",") for task in TASKS]}
VALUES = {name: NAMES.get(name, KINDS[type(x)]) for name, x in (vars(train.Run()) | vars(atlas.Config())).items()}
STARTS = ["", "data=a.txt", f"{TINY} data=a.txt length=8", "mode=eval", "mode=sample", "resume=1", "length=64",
          "vocab=65536", "length=9999999", f"{TINY} preset=gated_deltanet init_from={CHECKPOINT}"]
READING = ["mode=eval", "vocab=1", "vocab=300", "vocab=65536", "length=1", "size=170m", "skip_bad=1"]
SOUND = {"none": b"", "a.txt": b"abcdefgh" * 500, "lines.jsonl": QUESTIONS, "ids.txt": GPT2 + bytes(1000),
         **dict.fromkeys(["t.bin", "folder/t.bin", "folder.bin/t", "folder/t.txt"], shard(20240801, 7, 500, 2000))}
# The file that is damaged, and starts of command lines.
FILES = {name: [f"data={name.split('/')[0]}"] for name in SOUND} | {
  "none": STARTS, "out/log.csv": ["mode=plot"],
  CHECKPOINT: ["mode=sample", "mode=eval", "mode=export", "resume=1", f"init_from={CHECKPOINT} out=new"]}

def word(random):
  """key=value for a setting.  One value of ten and one word of thirty are hostile."""
  name, drawn = random.choice([*VALUES]), random.random()
  return random.choice(HOSTILE) if drawn > 0.97 else f"{name}={random.choice(HOSTILE if drawn < 0.1 else VALUES[name])}"

@runs
@cases("file", FILES)
def test_no_bad_input_ends_in_a_traceback_a_hang_or_a_file(file, command, folder, monkeypatch, capsys):
  """main returns 0, or 2 with one line that says how to mend it, and writes no file.  In the file some bytes are gone,
  mostly of the header, and others are in their place."""
  monkeypatch.setenv("HOME", str(folder.parent / "home"))
  signal.signal(signal.SIGALRM, lambda *_: pytest.fail("more than 5 s"))
  Path("out/step_00000008.safetensors").unlink()         # one checkpoint
  Path("empty").mkdir()
  Path("loop").symlink_to("loop")
  for name, content in SOUND.items(): written(name, content)
  def files(): return sorted((str(path), path.lstat().st_mtime_ns) for path in Path().rglob("*"))
  random, content = Random(0), Path(file).read_bytes()
  for _ in range(900 if file == "none" else 100):
    place, size = int(random.random() ** 4 * len(content)), random.choice([0, 1, 8, 100, 1 << 30])
    junk = random.choice([b"", random.randbytes(9), b"9" * 9000])
    written(file, content[:place] + junk + content[place + size:])
    words = [word(random) if file == "none" else random.choice(READING) for _ in range(random.randrange(6))]
    line, before = [*random.choice(FILES[file]).split(), *words, "steps=0"], files()
    signal.alarm(5)
    code = train.main(line)
    signal.alarm(0)
    error = capsys.readouterr().err
    assert re.fullmatch("error: .*(: .|the settings).*\n" if code else "", error) and code in (0, 2), (line, error)
    assert files() == before, line

# *** -m runs: parts, devices, caches, kills and full disks ***

ENVIRONMENTS = """JIT=0 PYTHONIOENCODING=ascii PYTHONIOENCODING=cp1252 XDG_CACHE_HOME=damaged.db CACHEDB=damaged.db
  CACHEDB=a/folder CACHEDB={}/~/cache.db CACHEDB=/proc/cache.db CACHEDB=/dev/null/cache.db"""

@runs
def test_a_run_goes_on_in_other_parts_in_another_precision_and_on_other_devices(command, run, refused):
  """The run in `two` has two devices, then one, then two.  It keeps close to that in `one`, on one device."""
  run("resume=1 steps=11 accum=2 dtype=bfloat16")
  _, meta, tensors, _ = data.read_file(newest())
  assert (meta["step"], meta["run"]["accum"], meta["config"]["dtype"]) == (11, 2, "bfloat16")
  assert {t.dtype for t in tensors.values()} == {dtypes.float}
  assert "batch=2: take one of 1, 2" in refused("resume=1 accum=4")
  for step, devices in ((2, 2), (3, 1), (4, 2)):
    line = f"{command} steps={step} eval_every=0 resume=1"
    for out, n in (("one", 1), ("two", devices)): run(f"{line} out={out} devices={n}")
    one, two = [get_state_dict(atlas.load(newest(out))[1]) for out in ("one", "two")]
    assert all(relative(t.numpy(), two[name].numpy()) < 1e-5 for name, t in one.items())

@runs
def test_the_step_cache_changes_nothing_and_one_that_cannot_be_used_is_no_error(ten, folder, run, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
  def hits(more=""):
    shutil.rmtree("out", ignore_errors=True)
    return "the compiled step is in" in run(f"{ten[0]} {more}").out
  def unchanged(): return result("out") == result(ten[1])
  with patch.object(pickle, "dumps", None):              # as for a step that cannot be pickled
    assert not hits() and unchanged() and not os.listdir(train.cache_folder())
  assert not hits() and unchanged()
  entry, = Path("cache").rglob("*.pickle")
  good = entry.read_bytes()
  assert hits() and unchanged() and not hits("lr=0.01 clip=0.5")
  for bad in (good[:1000], good[:-1] + bytes([good[-1] ^ 1])):
    entry.write_bytes(bad)
    assert not hits() and unchanged() and entry.read_bytes() != bad
  entry.chmod(0o666)                                     # others may write it: it is not trusted
  assert not hits() and not hits("accum=2")
  in_parts = result("out")
  assert hits("accum=2") and result("out") == in_parts
  monkeypatch.setenv("XDG_CACHE_HOME", "")
  with patch.object(Path, "home", side_effect=RuntimeError("Could not determine home directory.")):
    assert not hits() and unchanged()

@runs
def test_a_write_that_fails_loses_nothing_and_the_run_goes_on_to_the_same_end(ten, run, refused):
  command, size, limits = ten[0], resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
  with at_step(5, lambda: resource.setrlimit(size, (20_000, limits[1]))):       # bytes of a file
    try: message = refused(command, code=1)
    finally: resource.setrlimit(size, limits)
  assert "cannot be written" in message and "make room" in message
  assert sorted(os.listdir("out")) == ["log.csv", "step_00000002.safetensors", "step_00000004.safetensors"]
  assert len(log_rows("out")) == 7                       # the header, and six steps
  Path("out/step_00000006.tmp").write_bytes(b"half")     # as a kill in the middle of a write leaves it
  run(f"{command} resume=1")
  assert result("out") == result(ten[1]) and not list(Path("out").glob("*.tmp"))

@runs
@cases("setting", ENVIRONMENTS.split())
def test_an_environment_with_a_fault_costs_a_line_at_most_and_changes_no_loss(setting, ten, folder):
  """A path with ~ is what tinygrad makes of a home that does not exist."""
  (name, value), path = setting.format(folder).split("="), shutil.copy(ten[0].split("data=")[1], "text_\u0416.txt")
  written("damaged.db", os.urandom(5000))
  Path("a/folder").mkdir(parents=True)
  shown = process(f"{TEN} data={path} steps=3 eval_every=0", **{name: value})
  assert "Traceback" not in shown and shown.count("cannot be used") == (name == "CACHEDB")
  assert ("text_\\u0416.txt" in shown) == (name == "PYTHONIOENCODING")
  losses, expected = [[float(row[2]) for row in log_rows(out)[1:4]] for out in ("out", ten[1])]
  assert losses == pytest.approx(expected, abs=2e-6)     # the rate of the first two steps is that of all runs

@runs
def test_the_key_of_a_step_knows_tinygrads_files_its_variables_and_the_compiler(folder, monkeypatch):
  def key(**variables):
    with patch.dict(os.environ, variables): return train.cache_key(train.Run(), small("deltanet"))
  keys = [key(), key(JITBEAM="7"), key(BEAM_UPCAST_MAX="7"), key(CC="/bin/sh")]
  monkeypatch.setattr(train.tinygrad, "__path__", [str(folder)])
  for text, value in table("getenv('RATE') -> 0 | getenv('RATE') -> 1 | getenv('RATE') or 0 -> 1"):
    written("nn/optim.py", text.encode())
    keys.append(key(RATE=value))
  assert len(set(keys)) == 7 and key(RATE="1") == keys[-1]

@pytest.fixture
def resident(monkeypatch):
  """MB that are resident at each step of training, and at each token of a sample."""
  megabytes = list[int]()
  for module, name in ((data, "batch"), (evaluate, "drawn")):
    def watched(*args, original=getattr(module, name)):
      megabytes.append(resident_mb())
      return original(*args)
    monkeypatch.setattr(module, name, watched)
  return megabytes

@runs
def test_memory_and_speed_are_flat_in_training(command, run, resident):
  run(f"{command} steps=400 save_every=20 eval_every=0")
  assert resident[399] <= resident[100] + 5, resident
  speed = [float(row["tok_s"]) for row in csv.DictReader(Path("out/log.csv").open())]
  assert np.median(speed[-100:]) > np.median(speed[20:120]) / 2

@slow
def test_memory_is_flat_in_a_long_sample_and_nearly_in_a_long_prompt(command, run, resident):
  """A million bytes as Python's numbers take some MB themselves."""
  for size in (1_000, 1_000_000): run(f"mode=sample prompt=@{written('prompt', bytes(size))} tokens=20000")
  short, long = resident[:20_000], resident[20_000:]
  assert short[-1] <= short[100] + 5 and long[0] <= short[-1] + 50 and long[-1] <= long[100] + 5

KILLER = """import data, os, threading
original = data.batch
def batch(*args):
  if args[-1] == {}: threading.Timer({}, os.kill, (os.getpid(), 9)).start()
  return original(*args)
data.batch = batch"""

@runs
def test_a_run_killed_again_and_again_ends_byte_for_byte_like_one_in_a_process_that_compiles_anew(ten, folder):
  """SIGKILL at random moments of training, in which every second step writes a checkpoint."""
  line, random = f"{ten[0]} steps=300 eval_every=100", rng()
  process(f"{line} out=whole", XDG_CACHE_HOME=str(folder))
  for step in range(20, 300, 25):
    process(f"{line} resume=1 out=killed", -signal.SIGKILL, KILLER.format(step, random.uniform(0, 0.05)))
  process(f"{line} resume=1 out=killed")
  assert result("killed") == result("whole")

@runs
def test_ten_runs_side_by_side_end_alike(ten):
  """Each has two threads, to which it hands even the smallest kernel, and compiles with the others."""
  script = "import sys, kernels, train; kernels.HAND_OVER = 0.0; sys.exit(train.main(sys.argv[1:]))"
  words, variables = f"{ten[0]} eval_every=0 cores=2".split(), os.environ | {"PYTHONPATH": str(HERE)}
  started = [subprocess.Popen([sys.executable, "-c", script, *words, f"out={n}"], env=variables,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for n in range(10)]
  try: errors = [(one.communicate(timeout=600)[1], one.returncode) for one in started]
  finally:
    for one in started: one.kill()
  assert not any(code for _, code in errors), errors
  results = [result(str(n))[0] for n in range(10)]
  assert results == results[:1] * 10 and results[0] == result(ten[1])[0]

# *** -m runs: experiments ***

def shows(capsys, path):
  """What an experiment printed; it drew its picture, or said how it could."""
  printed = capsys.readouterr().out
  assert "pip install" in printed or Path("assets", path).stat().st_size > 10_000
  return printed
@experiment
def test_the_recall_experiment_shows_what_windows_and_features_buy(capsys):
  omega = "Omega, window 16"
  hits = experiments.recall(sizes=(4, 16), trials=8, seeds=1, rules=("delta", omega))
  correlated = {name: scores[1, 1].mean() for name, scores in hits.items()}
  assert correlated[omega, "identity"] > correlated["delta", "identity"] + 0.2
  assert correlated[omega, "poly"] > correlated["delta", "poly"] > correlated["delta", "identity"]
  assert correlated["delta", "exp"] > correlated["delta", "poly"] and "0." in shows(capsys, "recall.png")

@experiment
def test_the_learnability_experiment_learns_the_low_rank_mapping(capsys):
  losses = experiments.learnability(d=32, T=256, seeds=1, window=8)
  assert losses.shape == (5, 1, 256) and losses[0, 0, -64:].mean() < 0.8 * losses[0, 0, :64].mean()
  shown = shows(capsys, "learnability.png")
  for name in experiments.MAPPINGS: assert re.search(rf"^{re.escape(name)} +[1-9]e-0\d +\d\.\d+$", shown, re.M)

@experiment
def test_the_capacity_experiment_counts_what_least_squares_can_fit(capsys):
  """Of the 15 monomials of 4 components up to degree 2, 14 are independent on unit keys, because |k|^2 is constant.
  A network of 16 parameters for 2 components holds 8 pairs at most, and at least the 5 eighths that are tried first."""
  counts = experiments.capacity(dims=(4,), degrees=(1, 2), deep={2: (2,)}, seeds=1, threshold=1e-3, steps=400)
  assert counts["linear, degree 1"] == {4: [4]} and counts["linear, degree 2"] == {4: [14]}
  assert 2 <= counts["mlp, expand 2"][2][0] <= 8 and "mlp, expand 2" in capsys.readouterr().out

@experiment
def test_the_heatmap_shows_storing_the_window_and_forgetting(capsys):
  errors = experiments.heatmap(N=24, draws=4, d=8)
  delta, window, quadratic, forgets = errors.values()
  for e in errors.values(): assert np.diag(e).mean() < np.diag(e, 1).mean()     # lower than before the pair was written
  assert np.diag(delta).max() < 1e-6                     # a step of 1 writes a pair exactly
  assert np.diag(window, -6).mean() < np.diag(window).mean() - 0.1              # the window goes on correcting a pair
  assert forgets[-1, :6].mean() > quadratic[-1, :6].mean() + 0.1
  shown = shows(capsys, "memory.png")
  assert all(name in shown for name in errors)

TRIAL = experiments.Trial("deltanet", SMALL | dict(vocab=40), "mqar:vocab=40,length=12,pairs=2", steps=3, batch=2,
                          length=8, rates=(1e-9, 0.05), seeds=(0, 1), variants=({}, {"pairs": 1}))

@experiment
def test_finished_runs_come_from_the_ledger_and_each_is_a_run_of_its_own(capsys, monkeypatch):
  """A trial is compiled once for all seeds and rates: the second seed gives what a run of its own gives."""
  def compared():
    rows = experiments.compare("small", {"deltanet": TRIAL}, ["2 pairs", "1 pair"])["deltanet"]
    return rows, capsys.readouterr().out
  both, printed = compared()
  rate, asked, scores = both[0]["settings"]["rate"], list[tuple[float, int]](), experiments.scores_of(both)
  assert scores.shape == (2, 2) and rate >= 0.05 and f"{scores[:, 1].mean():.3f} +- " in printed
  [alone] = experiments.trained(TRIAL, [(rate, 1)])
  assert alone["scores"] == both[1]["scores"] and alone["gflop"] > 0 and alone["seconds"] > 0
  def trained(trial, runs):
    asked.extend(runs)
    return []
  monkeypatch.setattr(experiments, "trained", trained)
  again, printed_again = compared()
  assert again == both and not asked and printed_again == printed
  for change in (dict(steps=4), dict(fields=SMALL | dict(vocab=40, heads=1)), dict(rising=({"pairs": 1},))):
    assert not experiments.finished(TRIAL._replace(**change), [(rate, 1)])
  monkeypatch.setattr(experiments, "TRAIN", 0)
  assert not experiments.finished(TRIAL._replace(steps=4), [(rate, 1)]) and len(asked) == 3

@experiment
def test_a_trial_on_text_is_that_training_run(run):
  trial = TRIAL._replace(task="", fields=SMALL | dict(vocab=256))
  [trained] = experiments.trained(trial, [(0.05, 1)])
  run(f"preset=deltanet {TINY} steps=3 batch=2 length=8 lr=0.05 warmup=0 seed=1 tokens=1")
  assert float(log_rows("out")[-1][3]) == pytest.approx(trained["scores"][0], abs=1e-5)
  assert len(trained["scores"]) == 5

@experiment
def test_a_trial_may_train_at_rising_lengths_and_is_asked_beyond_them(monkeypatch):
  monkeypatch.setattr(experiments, "EXAMPLES", 2)
  monkeypatch.setattr(experiments, "LONGEST", 200)
  stories = TRIAL._replace(preset="gated_deltanet", task="babi:question=4,length=144", fields=SMALL | dict(vocab=256),
                           rising=({"length": 136}, {}), variants=({}, {"length": 288}))
  [trained] = experiments.trained(stories, [(0.01, 0)])
  assert trained["steps"] == 3 and trained["scores"] == [0, 0]
  [trained] = experiments.trained(stories._replace(preset="transformer++"), [(0.01, 0)])
  assert trained["scores"][0] == 0 and math.isnan(trained["scores"][1])

@experiment
def test_the_grid_of_rates_grows_where_the_best_is_at_its_end_and_other_seeds_take_the_best(monkeypatch):
  asked = []
  def finished(trial, runs):
    asked.extend(runs)
    return {(rate, seed): {"scores": [abs(math.log2(rate / 0.064))]} for rate, seed in runs}
  monkeypatch.setattr(experiments, "finished", finished)
  monkeypatch.setattr(experiments, "workers", lambda jobs: contextlib.nullcontext(map))
  [runs] = experiments.all_trained([experiments.TEXT])
  rates = 0.008, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128
  assert asked == [(rate, 0) for rate in rates] + [(0.064, seed) for seed in range(3)]
  assert experiments.best_rate(experiments.TEXT, runs) == 0.064

@experiment
def test_a_model_of_a_table_that_cannot_have_the_parameters_of_the_others_is_refused():
  with raises("parameters|mlp_ratio"): experiments.model(experiments.TEXT, "atlas", dim=256)

@experiment
@cases("name,count", [("text", 60), ("longer", 25), ("ablation", 90), ("window", 10), ("mqar", 80), ("official", 4),
                      ("mad", 72), ("niah", 210), ("stories", 20), ("streams", 108)])
def test_an_experiment_prints_the_scores_of_every_model_that_it_trains(name, count, capsys, monkeypatch):
  """The training itself is replaced.  Every configuration and task is made, every mean over the seeds printed."""
  numbers, means = itertools.count(1001), list[str]()
  def runs(trial):
    scores = 6 if trial.measure else 5
    if trial.task:
      task, scores = data.task(trial.task), len(trial.variants) * len(trial.shares)
      assert all(task.batch(1, 0, 0, **settings)[0].size for settings in trial.variants + trial.rising)
    numbered = [next(numbers) / 1000 for _ in range(scores)]
    means.extend(f"{score:.3f}" for score in numbered)
    record = {"scores": numbered, "curve": [[100, 3.0], [200, 2.0]], "steps": 7, "gflop": 2.0, "seconds": 0.1,
              "parameters": atlas.parts(experiments.config(trial))["total"], "minutes": 0.1, "commit": "unknown"}
    return {(rate, seed): record | {"settings": experiments.settings_of(trial, rate, seed)}
            for rate in trial.rates for seed in trial.seeds}
  monkeypatch.setattr(experiments, "all_trained", lambda trials: [runs(trial) for trial in trials])
  experiments.EXPERIMENTS[name]()
  assert len(means) == int(count) and set(means) <= set(capsys.readouterr().out.split())

@experiment
def test_what_is_measured_after_a_hostile_stream_is_the_loss_of_the_text_there(monkeypatch):
  monkeypatch.setattr(experiments, "AFTER", 1280)
  cfg = small("linear_attention", vocab=256, chunk=1, horizon=1 << 20)          # which forgets nothing
  params, text = atlas.init(cfg), data.load("python", 256, 128)
  measured = experiments.recovery(params, cfg, text, tokens=1024)
  for bits, before in zip(measured, ([], *experiments.hostile(1024, 256), text.train[:1024])):
    tokens = np.concatenate([before, text.val[:1280]]).astype(np.int32)[None]
    x, y = [Tensor(z.copy()) for z in (tokens[:, :-1], tokens[:, 1:])]
    losses = atlas.token_losses(atlas.forward(params, cfg, x)[0], y).numpy()
    assert bits == pytest.approx(losses[0, len(before) + 1024:].mean() / math.log(2), abs=1e-5)
  assert len(measured) == 6 and np.diff(np.sort(measured)).min() > 1e-4, measured

@experiment
def test_the_speed_experiment_compares_both_forms(capsys, monkeypatch):
  cfg = atlas.preset("titans", window=2, chunk=4, heads=2, key_dim=4, value_dim=4)
  monkeypatch.setattr(experiments, "LAYERS", {"small": (cfg, 1, 12)})
  experiments.speed()
  shown = capsys.readouterr().out
  assert re.search(r"small +fused .*\nsmall +ops .*\n +fused is [\d.]+ times as fast", shown)
  assert float(shown.split("outputs and gradients ")[1].split()[0]) < 1e-5

# *** the page of mode=watch ***
@contextlib.contextmanager
def opened(page):
  """A page in headless Chromium.  Yields a function that calls a method of the DevTools protocol, a function that
  evaluates JavaScript, and the events so far."""
  (command_in, command_out), (answer_in, answer_out) = os.pipe(), os.pipe()
  flags = "--headless=new --no-sandbox --disable-gpu --user-data-dir=profile --remote-debugging-pipe"
  command = f"exec chromium {flags} 3<&{command_in} 4>&{answer_out}"
  process = subprocess.Popen(["bash", "-c", command], pass_fds=(command_in, answer_out), stderr=subprocess.DEVNULL)
  answers, numbers, events, session = os.fdopen(answer_in, "rb"), itertools.count(1), list[dict](), dict[str, str]()
  def message(): return json.loads(b"".join(iter(lambda: answers.read(1), b"\0")))
  def call(method, **params):
    number = next(numbers)
    os.write(command_out, json.dumps({"id": number, "method": method, "params": params} | session).encode() + b"\0")
    while (answer := message()).get("id") != number: events.append(answer)
    return answer["result"]
  def evaluated(script): return call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")
  try:
    target = call("Target.createTarget", url="about:blank")["targetId"]
    session["sessionId"] = call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Runtime", "Log", "Network", "Page"): call(f"{domain}.enable")
    call("Page.navigate", url=page.absolute().as_uri())
    while not any(event.get("method") == "Page.loadEventFired" for event in events): events.append(message())
    yield call, evaluated, events
  finally:
    process.terminate()
    process.wait()
    for pipe in (command_in, command_out, answer_out): os.close(pipe)
    answers.close()

def computed(params, cfg, ids):
  """A model of one block with a linear memory, in float64: logits, and of each head the keys, values, gates and M_t."""
  p = {name: array(z) for name, z in get_state_dict(params).items()}
  block = {name.removeprefix("layers.0."): z for name, z in p.items()}
  def heads(z): return z.reshape(len(z), cfg.heads, -1).swapaxes(0, 1)
  def silu(z): return z * sigmoid(z)
  stream = p["embed"][ids]
  x = norm(stream) * block["norm1"]
  q, k, v = [heads(z) for z in np.split(x @ block["qkv"].T, 3, axis=1)]
  q, k, v = unit(q), unit(k), silu(v)
  v = v / np.sqrt(1 + np.square(v).sum(-1, keepdims=True))
  columns = np.cumsum(list(atlas.gate_sizes(cfg).values()))[:-1]
  gates = sigmoid(x @ block["gates"].T + block["gate_bias"])
  eta, gamma, alpha, theta = [heads(z) for z in np.split(gates, columns, axis=1)]
  eta, gamma = eta * atlas.rule.LOSSES["l2"].bound / cfg.chunk, gamma / cfg.window * (1 - theta)
  results, ys = [], []
  for W, *head in zip(block["memory.W"] * atlas.INIT.first, q, k, v, alpha[..., 0], theta[..., 0], eta[..., 0], gamma):
    def outputs(queries): return oracle(cfg, {"W": W}, queries, *head[1:], toward={"W": W})
    rows = [outputs(np.tile(e, (len(ids), 1))) for e in np.eye(cfg.key_dim)]               # M_t e, for all t
    results.append((*head[1:], np.concatenate([W[None], np.stack(rows, axis=-1)])))
    ys.append(norm(outputs(head[0])) * block["out_norm"])
  y = np.concatenate(ys, axis=1) * silu(x @ block["out_gate"].T + block["out_gate_bias"])
  stream = stream + y @ block["out"].T
  gate, value = np.split(norm(stream) * block["norm2"] @ block["mlp_in"].T, 2, axis=1)
  stream = stream + (silu(gate) * value) @ block["mlp_out"].T
  return norm(stream) * p["norm"] @ p["embed"].T, results

@runs
@cases("name,more", [("transformer++", ""), ("swa", "attn_window=3 persist=2"), ("dot", ""),
                     ("titans_mac", "attn_window=3")])
def test_attention_shows_its_weights_and_any_memory_what_it_recalls(name, more, run):
  written("text", b"Ada and Bob. " * 20)
  run(f"preset={name} steps=1 data=text {TINY} {more} length=8 eval_every=0")
  assert "mode=watch reads 8192" in run(f"mode=watch prompt={'a' * 8193}", 2).err
  run("mode=watch prompt=abcabcabc")
  page = Path("out/watch.html").read_text()
  assert page.count("<section>") == 2
  assert ("attention, square root" in page) == (name in ("transformer++", "swa")) == ("recall by M_0" not in page)

WEIGHTS_BITS = 1.76                      # bits per byte of assets/atlas.safetensors on the library's validation text
def test_the_weights_in_assets_predict_pythons_library_and_serve_where_out_has_none(run):
  assert train.WEIGHTS.stat().st_size < 2e6 and data.read_file(train.WEIGHTS).meta["text"]["is_bytes"]
  cfg, params = atlas.load(train.WEIGHTS)
  bits = evaluate.evaluator(params, cfg, data.load("python", 256, 128).val, 4, 256)(16_384).mean()
  assert abs(bits - WEIGHTS_BITS) < 0.1
  assert f"the weights are those of {train.WEIGHTS}" in run("mode=sample prompt=class tokens=3").out

CONTENT = b'<script>throw 1</script>\0\xff caf\xc3\xa9 "&\' \xe2\x80\xae\r\n' + b"Ada Ada Ada \t" * 3
@runs
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_the_page_of_a_text_shows_it_byte_for_byte_with_the_numbers_of_the_definition(run, monkeypatch, folder):
  cfg = small("gated_deltanet", layers=1, momentum=True, window=2, conv=0, chunk=3, vocab=256)
  params = atlas.init(cfg, seed=1)
  monkeypatch.setattr(train, "WEIGHTS", folder / "weights.safetensors")
  atlas.save(train.WEIGHTS, get_state_dict(params), {"config": dataclasses.asdict(cfg)})
  written("text", CONTENT)
  assert "weights are those of" in run("mode=watch prompt=@text").out
  page = Path("out/watch.html")
  assert not re.search(r'(src|href)="(?!data:)|url\(|@import|https?:', page.read_text())
  with opened(page) as (call, evaluated, events):
    assert evaluated("[...document.querySelectorAll('#text b')].map(b => parseInt(b.dataset.b, 16))") == list(CONTENT)
    characters = "".join(c for c in CONTENT.decode(errors="surrogateescape") if c.isprintable() or c == "\n")
    assert evaluated("document.getElementById('text').textContent") == characters
    assert evaluated("document.documentElement.lang && document.title")
    sections = evaluated("[...document.querySelectorAll('section')].map(s => [s.querySelectorAll('svg').length, "
                         "s.querySelectorAll('img').length, s.querySelector('pre').textContent])")
    assert [row[:2] for row in sections] == [[6, 2]] * cfg.heads
    box = evaluated("(({x, y}) => [x, y])(document.querySelectorAll('#text b')[3].getBoundingClientRect())")
    call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + 3, y=box[1] + 5)
    assert evaluated("[...document.querySelectorAll('#now tr')].length") == 5
    assert evaluated("document.querySelector('#now div').textContent").startswith("Token 3 is 'r'")
    rows = evaluated("[...document.querySelectorAll('#numbers tbody tr')].map("
                     "row => [...row.cells].map(cell => cell.textContent))")
    methods = {event["method"] for event in events}
    assert not methods & {"Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"}
    requests = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert {url.split(":")[0] for url in requests} <= {"file", "data"}
  logits, heads = computed(params, cfg, list(CONTENT))
  p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
  for t in (1, 20, len(CONTENT) - 1):
    assert relative(float(rows[t][2]), -np.log2(p[t - 1, CONTENT[t]])) < 1e-4
    assert relative([float(cell.rsplit(" ", 1)[1]) for cell in rows[t][3:]], np.sort(p[t])[:-6:-1]) < 1e-4
    for (k, v, alpha, theta, eta, gamma, M), (*_, numbers) in zip(heads, sections):
      shown = np.array(numbers.split("\n")[t + 1].split("\t"), float)
      length = np.linalg.norm
      errors = [length(z @ k[t] - v[t]) / length(v[t]) for z in (M[-1], M[0])]
      norms = length(M[t + 1] - M[t]), length(M[t + 1] - M[0])
      expected = [t, *norms, *errors, eta[t], *gamma[t], alpha[t], theta[t]]
      assert record("numbers of mode=watch", np.abs(shown / expected - 1).max()) < 1e-4

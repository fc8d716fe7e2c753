"""Claims about text, tasks and files of weights, to be merged into test_train.py.

They replace: test_recall_asks_for_what_was_seen_and_copies_keep_their_order, test_memorized_values_are_the_same_in_every_example,
test_fuzzy_recall_asks_for_the_values_of_keys_seen_before, test_compression_asks_for_every_token_but_the_summary.
Rows of test_a_task_says_what_is_wrong_in_one_line that change: see CHANGED below.  `_, meta, weights = data.read_file(...)`
(test_train.py, line 265) needs a fourth name: Saved has `signed`."""
import gzip, io, itertools, json, lzma, os, pickle, random, sqlite3, time, zipfile
import numpy as np
import pytest
import data
from tinygrad import Tensor

# *** MAD: what a test scores ***

# Scored places of a test example, as the paper's generators have them (means of 300 examples).
PLACES = [("in_context_recall", {}, 56.0), ("noisy_recall", {}, 43.6), ("noisy_recall", dict(vocab=48), 36.1),
          ("noisy_recall", dict(vocab=144), 16.4), ("fuzzy_recall", {}, 4.2), ("fuzzy_recall", dict(vocab=32), 2.2),
          ("selective_copying", {}, 16), ("compression", {}, 32), ("memorization", {}, 16)]

@pytest.mark.parametrize("name,settings,places", PLACES, ids=str)
def test_a_test_example_of_mad_scores_as_many_places_as_the_paper_s(name, settings, places):
  y = data.task(name).batch(1200, 0, data.HELD_OUT, **settings)[1]
  counts = (y >= 0).sum(1)
  error = counts.std() * (1 / 300 + 1 / 1200) ** 0.5       # of the difference: the figure is a mean of 300
  print(f"{name} {settings}: {counts.mean():.2f} places, {places} given")
  assert abs(counts.mean() - places) <= 3 * error + 0.05   # 0.05: the figure is rounded

SETTINGS = {"mqar": [{}, dict(vocab=128, length=64, pairs=8, again=8, noise=True)], "copy": [{}, dict(vocab=2)],
  "in_context_recall": [{}, dict(vocab=4, length=4), dict(vocab=6)], "noisy_recall": [{}, dict(noise=0.9, vocab=20, length=4), dict(vocab=144)],
  "fuzzy_recall": [{}, dict(vocab=7, length=18), dict(vocab=128, length=1024)], "selective_copying": [{}, dict(vocab=3, length=3, copies=1)],
  "compression": [{}, dict(vocab=3, length=2)], "memorization": [{}, dict(vocab=3), dict(vocab=9)], "niah": [{}], "babi": [{}, dict(question=5)]}

@pytest.mark.parametrize("name", data.TASKS)
@pytest.mark.parametrize("index", [0, data.HELD_OUT])
def test_tokens_and_labels_of_a_task_are_in_its_vocabulary_and_every_example_is_scored(name, index):
  task = data.task(name)
  for settings in SETTINGS[name]:
    x, y = task.batch(40, 3, index, **settings)
    vocab = settings.get("vocab", task.vocab)
    assert x.min() >= 0 and x.max() < vocab and y.max() < vocab and set(y[y < 0]) <= {-100} and (y >= 0).any(1).all()

@pytest.mark.parametrize("name,settings,keys", [("in_context_recall", {}, 8), ("in_context_recall", dict(vocab=32, length=64), 16),
  ("noisy_recall", {}, 8), ("noisy_recall", dict(vocab=144, noise=0.6), 64), ("noisy_recall", dict(vocab=48), 16)], ids=str)
def test_recall_asks_for_the_value_of_every_key_seen_before_and_last_for_one_that_was(name, settings, keys):
  x, y = data.TASKS[name](100, 2, 0, **settings)
  noisy = 0
  for tokens, labels in zip(x.reshape(100, -1, 2).tolist(), y.reshape(100, -1, 2).tolist()):
    known = dict[int, int]()
    for (key, value), label in zip(tokens, labels):
      noisy += key >= 2 * keys
      if key < 2 * keys: assert key < keys <= value < 2 * keys and label == [known.get(key, -100), -100]
      else: assert value >= 2 * keys and label == [-100, -100]                         # noise comes in pairs, and is not asked for
      if key < keys: assert known.setdefault(key, value) == value
    assert labels[-1][0] == tokens[-1][1]
  share = settings.get("noise", 0.2 if name == "noisy_recall" else 0)
  assert abs(noisy / (x.size / 2) - share) < 0.05

def motifs_of(tokens, vocab):
  """(key, value) of an example of fuzzy recall, read from its tokens: keys and values are of two halves, and take turns."""
  half, padding = (vocab - 1) // 2, vocab - 1
  content = list(itertools.dropwhile(lambda token: token == padding, tokens))
  runs = [tuple(run) for _, run in itertools.groupby(content, key=lambda token: token >= half)]
  assert padding not in content and len(runs) % 2 == 0
  return len(tokens) - len(content), list(zip(runs[::2], runs[1::2]))

@pytest.mark.parametrize("index", [0, data.HELD_OUT])
@pytest.mark.parametrize("settings", [{}, dict(shortest=3), dict(vocab=32, length=401), dict(vocab=7, length=18)], ids=str)
def test_fuzzy_recall_asks_for_the_values_of_motifs_seen_before(settings, index):
  vocab, rows, shortest = settings.get("vocab", 16), 100, 3 if index else settings.get("shortest", 1)
  x, y = data.fuzzy_recall(rows, 3, index, **settings)
  lengths, of_values, probes = [0] * 4, [0] * 4, list[float]()
  for tokens, labels in zip(x.tolist(), y.tolist()):
    padding, pairs = motifs_of(tokens, vocab)
    assert 6 <= padding and all(len(set(motif)) == len(motif) <= 3 for pair in pairs for motif in pair)
    known, expected = dict[tuple, tuple](), [-100] * padding
    for key, value in pairs:
      expected += [-100] * len(key) + (list(value) if key in known else [-100] * len(value))
      assert known.setdefault(key, value) == value
      lengths[len(key)] += 1
      of_values[len(value)] += 1
    assert labels == expected[1:] + [-100] and labels[-2] == tokens[-1]                # one place before; the last pair is asked for
    probes.append([key for key, _ in pairs].index(pairs[-1][0]) / len(pairs))
  assert all(lengths[shortest:]) and not any(lengths[:shortest]) and all(of_values[1:])
  if "vocab" not in settings:                            # a drawn length, then one of all motifs of that length; a drawn place
    assert max(of_values[1:]) < 1.25 * min(of_values[1:]) and max(lengths[shortest:]) < 1.25 * min(lengths[shortest:])
    assert max(probes) > 0.8 and (index == 0 or 0.35 < np.mean(probes) < 0.55)

def test_motifs_of_one_length_are_all_as_likely():
  motifs = data._motifs(np.random.default_rng(0), (42_000,), 0, 7, 2)
  for length, kinds in ((2, 7 * 6), (3, 7 * 6 * 5)):
    counts = np.unique(motifs[(motifs >= 0).sum(1) == length], axis=0, return_counts=True)[1]
    assert len(counts) == kinds and abs(counts.sum() - 21_000) < 600                    # as many of each length
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < kinds + 5 * (2 * kinds) ** 0.5          # chi squared

@pytest.mark.parametrize("vocab,length,copies", [(16, 256, 16), (64, 64, 31), (3, 3, 1)])
def test_selective_copying_has_one_copy_token_and_labels_under_blanks(vocab, length, copies):
  x, y = data.selective_copying(50, 0, 0, vocab, length, copies)
  for tokens, labels in zip(x.tolist(), y.tolist()):
    at = tokens.index(vocab - 1)
    assert at == length - copies - 1 and tokens[at + 1:] == [vocab - 2] * copies and set(labels[:at + 1]) == {-100}
    assert [token for token in tokens[:at] if token < vocab - 2] == labels[at + 1:] and tokens.count(vocab - 1) == 1
  if length == 256: assert abs(np.nonzero(x[:, :239] < 14)[1].mean() - 119) < 8         # drawn places, everywhere

def test_compression_asks_for_every_token_and_ends_with_the_summary():
  x, y = data.compression(100, 0, 0)
  assert np.array_equal(x, y) and (x[:, -1] == 15).all() and set(x[:, :-1].flat) == set(range(15))

def test_memorized_values_are_one_to_one_and_the_same_in_all_runs():
  def mapping(seed, index):
    x, y = data.memorization(400, seed, index)
    assert (x[:, 1::2] == 255).all() and (y[:, ::2] == -100).all()
    return set(zip(x[:, ::2].ravel().tolist(), y[:, 1::2].ravel().tolist()))
  pairs = mapping(7, 0)
  assert pairs == mapping(8, 3) == mapping(0, data.HELD_OUT) and len(pairs) == 127
  assert {key for key, _ in pairs} == set(range(127)) and {value for _, value in pairs} == set(range(127, 254))
  assert sorted(pairs) != sorted((key, 127 + key) for key, _ in pairs)                  # shuffled

def test_a_copy_is_asked_for_token_by_token():
  x, y = data.copy(3, 0, 0, length=10)
  assert (x[:, 5] == 0).all() and np.array_equal(y[:, 5:], x[:, :5]) and np.array_equal(x[:, 6:], x[:, :4])

# rows of test_a_task_says_what_is_wrong_in_one_line that change, or are new
CHANGED = {"copy length=3": "not even: take 4", "mqar pears=3": "take one of seed, vocab", "selective_copying copies=200": "take 127 or fewer",
  "fuzzy_recall vocab=6": "take 7 and 18", "fuzzy_recall length=17": "take 7 and 18", "fuzzy_recall shortest=4": "take 1 to 3",
  "in_context_recall vocab=7": "take an even number of 4 or more", "noisy_recall vocab=18": "take an even number of 20 or more",
  "in_context_recall length=2": "asks for nothing", "babi length=1048577": "takes 0 to 1048576", "niah length=1048577": "takes 0 to 1048576",
  "copy length=100000": "takes 0 to 65536", "mqar seed=x": "invalid literal"}

@pytest.mark.parametrize("words,message", CHANGED.items())
def test_a_task_says_what_is_wrong_in_one_line(words, message, capsys):
  assert data.shown(words.split()) == 2
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 1 and message in lines[0]

def test_examples_are_shown_with_their_settings_and_seed(capsys):
  assert data.shown("mqar pairs=2 length=16 vocab=32 seed=3".split()) == 0
  shown = capsys.readouterr().out
  x, y = data.mqar(2, 3, 0, pairs=2, length=16, vocab=32)
  assert shown.count("(2 of 16 places scored)") == 2 and all(f" {t}>{label}" in shown for t, label in zip(x[y >= 0], y[y >= 0]))

def test_a_story_of_a_million_bytes_is_made_in_a_moment_and_solved():
  task = data.task("babi:question=2,length=1000000")
  start = time.perf_counter()
  x, y = task.batch(1, 0, data.HELD_OUT)
  assert time.perf_counter() - start < 2 and x.shape == (1, 1_000_000) and task.variants() == [{}]
  # from test_train: prompts, answers = spoken(1_000_000, x, y); assert [solved(prompt) for prompt in prompts] == answers
  assert [v.get("length") for v in data.task("babi:length=262144").variants()] == [None, 524288, 1048576]

# *** files of text ***

def binary_files():
  """Name -> contents of files that are no text, most of them made by the tools that make them."""
  text, tar, zipped, table = b"some text " * 300, io.BytesIO(), io.BytesIO(), io.BytesIO()
  with zipfile.ZipFile(zipped, "w") as file: file.writestr("a.txt", text)
  np.save(table, np.arange(999))
  import bz2, tarfile
  with tarfile.open(fileobj=tar, mode="w") as file:
    info = tarfile.TarInfo("a.txt")
    info.size = len(text)
    file.addfile(info, io.BytesIO(text))
  header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
  made = {"gzip": gzip.compress(text), "zip": zipped.getvalue(), "bzip2": bz2.compress(text), "xz": lzma.compress(text), "NumPy": table.getvalue(),
          "pickle": pickle.dumps(list(range(999))), "tar": tar.getvalue(), "safetensors": len(header).to_bytes(8, "little") + header + bytes(4)}
  starts = {"zstd": b"\x28\xb5\x2f\xfd", "SevenZip": b"7z\xbc\xaf\x27\x1c", "Parquet": b"PAR1", "HDF5": b"\x89HDF\r\n\x1a\n", "PDF": b"%PDF-1.7\n",
            "SQLite": b"SQLite format 3\0", "PNG": b"\x89PNG\r\n\x1a\n", "JPEG": b"\xff\xd8\xff\xe0", "ELF": b"\x7fELF\2\1\1", "GGUF": b"GGUF\3\0",
            "RIFF": b"RIFF\0\0\0\0WAVEfmt ", "Ogg": b"OggS\0", "GIF": b"GIF89a", "Arrow": b"ARROW1\0\0"}
  return made | {name: start + bytes(range(256)) * 8 for name, start in starts.items()}

@pytest.mark.parametrize("ending", ["txt", "bin"])
def test_a_binary_format_is_named_and_refused_whatever_the_ending(ending, tmp_path):
  for name, content in binary_files().items():
    path = tmp_path / f"{name}.{ending}"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"is a {name} file.*: unpack it, or convert it") as e: data.load(str(path), 256, 16)
    assert len(str(e.value).splitlines()) == 1

def test_sqlite_as_it_is_written_is_refused(tmp_path):
  database = sqlite3.connect(tmp_path / "a.txt")
  database.execute("create table t (x)")
  database.commit()
  database.close()
  with pytest.raises(ValueError, match="is a SQLite file"): data.read(str(tmp_path / "a.txt"))

@pytest.mark.parametrize("content", [b"PARADE 1\n" * 99, b"MZ is a country code\n" * 99, "\u00e4\u00f6\u00fc\n".encode() * 99, b"\xe4\xf6\xfc\n" * 99,
                                     b"\xff\xfe" + "text\n".encode("utf-16-le") * 99, bytes(range(1, 256)) * 4], ids=repr)
def test_other_bytes_are_text(content, tmp_path):
  (tmp_path / "a.txt").write_bytes(content)
  assert data.load(str(tmp_path / "a.txt"), 256, 8).is_bytes

@pytest.mark.parametrize("vocab,highest", [(50257, 50000), (200, 150), (1 << 18, (1 << 18) - 1)])
@pytest.mark.parametrize("dtype", ["<u4", "<i8"])
def test_wide_ids_without_a_header_are_refused(dtype, vocab, highest, tmp_path):
  ids = np.random.default_rng(0).integers(0, highest, 4000)
  ids.astype(dtype).tofile(tmp_path / "a.bin")
  message = "uint16 is too small for vocab=262144: write 256 int32" if vocab > 1 << 16 else "looks like ids of 32 bits"
  with pytest.raises(ValueError, match=message): data.load(str(tmp_path / "a.bin"), vocab, 16)
  for narrow in (ids % 200, ids % 2, ids * 0, ids % 65_536):
    narrow.astype("<u2").tofile(tmp_path / "b.bin")
    assert len(data.load(str(tmp_path / "b.bin"), 65_536, 16).val) == 400

def test_tokens_outside_the_vocabulary_are_refused_in_both_parts(tmp_path):
  for place in (3, 3999):                                # in training, in validation
    ids = np.arange(4000) % 50
    ids[place] = 77
    ids.astype("<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="token 77, outside vocab=77: give vocab=78"): data.load(str(tmp_path / "a.bin"), 77, 16)
    assert data.load(str(tmp_path / "a.bin"), 78, 16).train.max() < 78

@pytest.mark.parametrize("version,size,message", [(2, 2024, "version 2, not 1"), (1, 2000, "copy it again"), (1, 900, "copy it again")])
def test_damaged_token_files_are_named(version, size, message, tmp_path):
  header = np.zeros(256, "<i4")
  header[:3] = 20240520, version, 500
  (tmp_path / "a.bin").write_bytes((header.tobytes() + bytes(1000))[:size])
  with pytest.raises(ValueError, match=message): data.read(str(tmp_path / "a.bin"))
  (tmp_path / "b.txt").write_bytes(np.array([20240520, 1, 500]).astype("<i4").tobytes() + bytes(1012) + np.arange(500).astype("<u2").tobytes())
  assert not data.read(str(tmp_path / "b.txt"))[1]       # the header counts, not the ending

def test_a_folder_leaves_out_what_is_no_text_and_says_so(tmp_path):
  root, outside = tmp_path / "clone", tmp_path / "outside.txt"
  for name in (".git/objects", "sub", ".hidden"): (root / name).mkdir(parents=True)
  outside.write_bytes(b"3" * 100)
  files = {"b.py": b"2" * 100, "a.txt": b"1" * 100, ".git/objects/pack": os.urandom(999), ".env": b"secret", "sub/nul.txt": b"text\0text",
           "sub/x.gz": gzip.compress(b"text"), "sub/random": random.Random(0).randbytes(100).replace(b"\0", b"\1"), "sub/latin1.txt": b"\xe4" * 100,
           "sub/empty": b"", ".hidden/a.txt": b"hidden"}
  for name, content in files.items(): (root / name).write_bytes(content)
  (root / "z_again").symlink_to(root / "a.txt")
  (root / "c_link").symlink_to(outside)
  (root / "c_twice").symlink_to(outside)
  (root / "sub" / "loop").symlink_to(root)
  (root / "gone").symlink_to(tmp_path / "nowhere")
  os.mkfifo(root / "pipe")
  text = data.load(str(root), 256, 16)
  assert np.concatenate([text.train, text.val]).tobytes() == b"1" * 100 + b"2" * 100 + b"3" * 100 + b"\xe4" * 100
  counts = dict(reversed(part.split(" ", 1)) for part in text.name.removeprefix(f"{root} (left out: ").removesuffix(")").split(", "))
  assert counts == {"hidden": "3", "not files": "3", "not text": "3", "read already": "2"}
  assert data.load(str(root / ".hidden" / ".."), 256, 16).train.tobytes() == text.train.tobytes()
  for name in ("a.txt", "b.py", "c_link", "c_twice", "z_again", "sub/latin1.txt"): (root / name).unlink()
  with pytest.raises(ValueError, match="holds no text .left out: 3 hidden"): data.read(str(root))
  header = np.zeros(256, "<i4")
  header[:3] = 20240520, 1, 0
  header.tofile(root / "shard.bin")
  with pytest.raises(ValueError, match="holds token files: name one, data=.*shard.bin"): data.read(str(root))

def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
  for name in ("a.txt", "b.txt"): (tmp_path / name).write_text("text" * 99)
  original = type(tmp_path).read_bytes
  def denied(path):
    if path.name == "b.txt": raise PermissionError(13, "Permission denied", str(path))
    return original(path)
  monkeypatch.setattr(type(tmp_path), "read_bytes", denied)
  for spec in (tmp_path, tmp_path / "b.txt"):
    with pytest.raises(ValueError, match="b.txt cannot be read .Permission denied.: give"): data.read(str(spec))

@pytest.mark.parametrize("spec", ["/dev/zero", "/dev/null", "", "/no/such", "loop"])
def test_what_is_neither_file_nor_folder_is_refused_at_once(spec, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  os.symlink("loop", "loop")
  with pytest.raises(ValueError, match="does not exist, or is neither a file nor a folder"): data.read(spec)

@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("ending", ["txt", "bin"])
def test_a_file_rewritten_while_it_is_read_cannot_harm(mapped, ending, tmp_path, monkeypatch):
  path = tmp_path / f"a.{ending}"
  np.random.default_rng(0).integers(1, 200, 40_000).astype("<u2").tofile(path)
  if mapped: monkeypatch.setattr(data, "IN_MEMORY", 1000)
  text = data.load(str(path), 256, 16)
  before = [z.tobytes() for z in data.batch(text.train, 4, 16, 0, 0)]
  data.unchanged(text)
  assert isinstance(text.train, np.memmap) == mapped == (text.stamp is not None)
  content = path.read_bytes()
  if not mapped:
    path.write_bytes(b"")
    data.unchanged(text)
    assert [z.tobytes() for z in data.batch(text.train, 4, 16, 0, 0)] == before
    return
  os.utime(path, (1, 1))
  with pytest.raises(ValueError, match="was changed while it is read: copy it"): data.unchanged(text)
  path.write_bytes(content + b"more")
  with pytest.raises(ValueError, match="was changed while it is read: copy it"): data.unchanged(text)
  path.unlink()
  with pytest.raises(ValueError, match="was changed while it is read: copy it"): data.unchanged(text)

def test_the_digest_of_the_training_part_notices_other_text_of_the_same_length(tmp_path, monkeypatch):
  content = bytearray(np.random.default_rng(0).integers(97, 105, 400_000, dtype=np.uint8))
  def load():
    (tmp_path / "a.txt").write_bytes(content)
    return data.load(str(tmp_path / "a.txt"), 256, 16)
  first = load()
  for place in (0, 65_536, 200_001, 359_999):            # all of a small text
    content[place] ^= 1
    changed = load()
    assert changed.sample_digest != first.sample_digest and changed.digest == first.digest
    content[place] ^= 1
  assert load().sample_digest == first.sample_digest
  monkeypatch.setattr(data, "BLOCK", 16)                 # 1,024 blocks of a large one: 1 byte of 22
  sampled = load().sample_digest
  content[:360_000] = content[:360_000][::-1]
  assert load().sample_digest != sampled

def test_a_file_named_for_evaluation_can_be_read_whole(tmp_path):
  (tmp_path / "a.txt").write_bytes(bytes(range(97, 122)) * 4)
  text = data.load(str(tmp_path / "a.txt"), 256, 99, parts=1)
  assert len(text.train) == 0 and len(text.val) == 100
  with pytest.raises(ValueError, match="leave 100 .* give 101 for length=100"): data.load(str(tmp_path / "a.txt"), 256, 100, parts=1)

# *** files of weights ***

def again(path, change):
  """A safetensors file written once more by a tool of its own: `change` may alter its header."""
  content = path.read_bytes()
  size = int.from_bytes(content[:8], "little")
  header, tensors = json.loads(content[8:8 + size]), content[8 + size:]
  text = json.dumps(change(header)).encode()
  copy = path.with_name("again.safetensors")
  copy.write_bytes(len(text).to_bytes(8, "little") + text + tensors)
  return copy

@pytest.fixture
def weights(tmp_path):
  path = tmp_path / "w.safetensors"
  data.save_file(path, {"a": Tensor(np.arange(6, dtype=np.float32).reshape(2, 3)), "b": Tensor([7.0])}, {"step": 3, "config": {"dim": 8}})
  return path

def test_weights_without_our_checksum_load_and_are_called_unsigned(weights):
  assert data.read_file(weights).signed
  def unsigned(header):
    del header["__metadata__"]["sha256"]
    return header
  def reordered(header): return {"b": header["b"], "a": header["a"], "__metadata__": dict(reversed(unsigned(header)["__metadata__"].items()))}
  for change in (unsigned, reordered):
    saved = data.read_file(again(weights, change))
    assert not saved.signed and saved.meta == {"step": 3, "config": {"dim": 8}} and saved.tensors["a"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
  copy = again(weights, unsigned)
  for content in (copy.read_bytes()[:-1], copy.read_bytes() + b"x"):                  # what can be told without a checksum
    copy.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"): data.read_file(copy)

def test_weights_with_a_wrong_checksum_are_damaged_and_without_our_metadata_foreign(weights):
  def changed(**meta): return lambda header: header | {"__metadata__": header["__metadata__"] | meta}
  for path in (again(weights, lambda header: header), again(weights, changed(sha256="ab" * 32)), again(weights, changed(step="4"))):
    with pytest.raises(ValueError, match="is damaged, its checksum does not match"): data.read_file(path)
  for change in (lambda header: {n: x for n, x in header.items() if n != "__metadata__"}, changed(format="pt")):
    with pytest.raises(ValueError, match="is not a checkpoint of this project"): data.read_file(again(weights, change))
  with pytest.raises(ValueError, match="has the format atlas-1, not atlas-2"): data.read_file(again(weights, changed(format="atlas-1")))
  content = weights.read_bytes()
  weights.write_bytes(content[:-4] + b"abcd")
  with pytest.raises(ValueError, match="is damaged"): data.read_file(weights)

def test_a_file_that_cannot_be_written_leaves_nothing_behind(weights, monkeypatch):
  before = weights.read_bytes()
  def full(_): raise OSError(28, "No space left on device")
  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError): data.save_file(weights, {"a": Tensor([1.0])}, {})
  assert weights.read_bytes() == before and [p.name for p in weights.parent.iterdir()] == [weights.name]

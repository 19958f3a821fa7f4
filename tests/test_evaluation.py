"Scores against hand-computed ones and the SugarCrepe authors' way; each picture and text once; faults by name."
import io, json, zipfile
import numpy as np, pytest, torch
from cs_clip.benchmarks import Benchmark, Choice, retrieval
from cs_clip.data import ImageStore
from cs_clip.evaluation import (
    EXAMPLES, Embedder, choice_scores, cohens_d, evaluate, intervals, margins, ranks, recall_at_k, result_file, verdicts)
from cs_clip.files import CSClipError, read_json, write_json
from cs_clip.models import load
from PIL import Image
from tiny_clip import captions, png, tiny_clip


@pytest.fixture(scope='module')
def model(tmp_path_factory): return load(tiny_clip(tmp_path_factory.mktemp('clip')))


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    "Eight pictures of noise, each of another size."
    path, rng = tmp_path_factory.mktemp('images')/'test.zip', np.random.default_rng(0)
    with zipfile.ZipFile(path, 'w') as z:
        for i in range(8):
            out = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (32 + i, 40, 3), dtype=np.uint8)).save(out, 'png')
            z.writestr(f'{i}.png', out.getvalue())
    return path


def choices(n=60, box=None, group=None):
    texts, rng = captions(), np.random.default_rng(1)
    pairs = [rng.choice(len(texts), 2, replace=False) for _ in range(n)]
    return [Choice(str(i), 'ab'[i % 2], f'{i % 8}.png', (texts[p], texts[q]), box, group and group(i)) for i, (p, q) in enumerate(pairs)]


def benchmark(images, items=None, **changes):
    return Benchmark('toy', choices() if items is None else items, images, {'a': 30, 'b': 30}, **changes)


class Counting:
    "A model that notes what it is asked to encode."
    def __init__(self, model): self.model, self.pictures, self.sentences = model, 0, 0
    def __getattr__(self, name): return getattr(self.model, name)
    def eval(self): return self
    def encode_image(self, x): self.pictures += len(x); return self.model.encode_image(x)
    def encode_text(self, x): self.sentences += len(x); return self.model.encode_text(x)


@torch.inference_mode()
def one_at_a_time(model, store, items):
    "The SugarCrepe authors' loop (their evaluate.py): a picture and two texts a step."
    right = []
    for c in items:
        v = model.encode_image(model.preprocess(store.open(c.image))[None])
        p, n = (model.encode_text(model.tokenize([t])) for t in c.texts)
        right.append(bool((v @ p.T).item() > (v @ n.T).item()))
    return right


def test_verdicts_are_those_of_one_item_at_a_time(model, images):
    items = choices(120)
    embedder = Embedder(model, 16)
    pictures = embedder.images(images, [(c.image, None) for c in items])
    texts, rows = embedder.texts([t for c in items for t in c.texts])
    right, _ = verdicts(margins(choice_scores(torch.stack([pictures[c.image, None] for c in items]), texts, torch.tensor(rows).view(-1, 2))))
    expected = one_at_a_time(model, ImageStore(images), items)
    assert right.tolist() == expected and 0 < sum(expected) < 120
    result = evaluate(model, benchmark(images, items))
    assert result['subsets']['a']['accuracy'] == pytest.approx(np.mean(expected[::2]), abs=1e-6)
    assert result['avg'] == pytest.approx(np.mean(expected), abs=1e-6)


def test_each_picture_box_and_text_is_encoded_once(model, images):
    counting, items = Counting(model), choices(40)
    embedder = Embedder(counting, 7)
    items += [c._replace(id=f'box {c.id}', box=(2, 2, 9, 9)) for c in items]
    first = evaluate(embedder, benchmark(images, items))
    assert counting.pictures == 16 and counting.sentences == len({t for c in items for t in c.texts})
    again = evaluate(embedder, benchmark(images, items))
    assert again == first and counting.pictures == 16


def test_texts_that_the_model_cannot_tell_apart_tie(model, images):
    same = [Choice(str(i), 'a', f'{i}.png', ('a red cat', 'a  RED cat')) for i in range(8)]
    result = evaluate(model, Benchmark('toy', same, images, {'a': 8}))
    assert result['subsets']['a']['ties'] == 8 and result['avg'] == 0


def test_verdicts_by_hand():
    right, tied = verdicts(margins(torch.tensor([[.9, .1, .3], [.5, .5, .1], [.2, .1, .7]])))
    assert right.tolist() == [True, False, False] and tied.tolist() == [False, True, False]


def test_cohens_d_by_hand():
    positive, negative = np.array([.30, .34, .38, .30]), np.array([.20, .30, .24, .22])
    d = (.33 - .24)/np.sqrt((.0044/3 + .0056/3)/2)
    assert cohens_d(positive, negative) == pytest.approx(d)
    assert cohens_d(positive[:1], negative[:1]) is None and cohens_d(np.ones(3), np.ones(3)) is None


def test_ranks_by_hand_and_in_blocks():
    rng = np.random.default_rng(0)
    v, t = (torch.nn.functional.normalize(torch.tensor(rng.normal(size=(n, 4)), dtype=torch.float32), dim=1) for n in (7, 20))
    own = [[3*i - 1, 3*i] if i else [0] for i in range(7)]
    s, expected = (v @ t.T).numpy(), []
    for i in range(7): expected.append(sum(s[i, j] >= s[i, own[i]].max() for j in range(20) if j not in own[i]))
    for block in (1, 3, 100): assert ranks(v, t, own, block).tolist() == expected
    assert [recall_at_k(np.array([0, 4, 9, 5]), k) for k in (1, 5, 10)] == [.25, .5, 1]


def test_retrieval(model, images, tmp_path):
    texts = captions()[:15] + ['a cat']  # the last is said of two pictures
    sentences = [[*texts[2*i:2*i + 2]] for i in range(8)]
    sentences[0].append('a cat')
    entries, n = [], iter(range(100))
    for i, said in enumerate(sentences):
        entries.append({'filename': f'{i}.png', 'split': 'test', 'sentences': [{'raw': t, 'sentid': next(n)} for t in said]})
    write_json(tmp_path/'k.json', {'images': entries})
    result = evaluate(model, retrieval(tmp_path/'k.json', 'test', images))
    store = ImageStore(images)
    with torch.inference_mode():
        v = torch.cat([model.encode_image(model.preprocess(store.open(f'{i}.png'))[None]) for i in range(8)])
        s = v @ torch.cat([model.encode_text(model.tokenize([t])) for t in texts]).T
    for k in (1, 5, 10):
        i2t = [any(texts[j] in sentences[i] for j in s[i].topk(k).indices) for i in range(8)]
        t2i = [i in s[:, texts.index(t)].topk(min(k, 8)).indices for i in range(8) for t in sentences[i]]
        assert result['metrics'][f'i2t_r{k}'] == pytest.approx(np.mean(i2t), abs=1e-6)
        assert result['metrics'][f't2i_r{k}'] == pytest.approx(np.mean(t2i), abs=1e-6)
    assert {k: (x['n'], x['expected']) for k, x in result['subsets'].items()} == {'i2t': (8, 8), 't2i': (17, 17)} and result['complete']
    assert result['subsets']['i2t']['accuracy'] == result['metrics']['i2t_r1']


def test_averages_macro_and_small_groups(model, images):
    items = choices(group=lambda i: 'often' if i < 40 else 'seldom' if i < 55 else 'rare')
    right = np.array(one_at_a_time(model, ImageStore(images), items))
    result = evaluate(model, benchmark(images, items, min_group=10))
    a, b = right[::2].mean(), right[1::2].mean()
    assert result['avg'] == pytest.approx(right.mean(), abs=1e-6) and result['std'] == pytest.approx(abs(a - b)/2, abs=1e-6)
    m = result['metrics']
    assert set(m['groups']) == {'often', 'seldom'} and m['groups']['seldom']['n'] == 15 and m['micro'] == result['avg']
    assert m['macro'] == pytest.approx((right[:40].mean() + right[40:55].mean())/2, abs=1e-6)
    assert evaluate(model, benchmark(images, items, min_group=100))['metrics']['macro'] is None


def test_controlled_has_effect_sizes_and_examples(model, images):
    result = evaluate(model, benchmark(images, choices(80, box=(1, 2, 20, 16)), kind='controlled'))
    assert all(isinstance(s['cohens_d'], float) and isinstance(s['margin'], float) for s in result['subsets'].values())
    shown = result['examples']
    assert [e['id'] for e in shown] == [str(i) for i in range(2*EXAMPLES)] and shown[0]['box'] == [1, 2, 20, 16]
    assert [e['margin'] > 0 for e in shown] == list(one_at_a_time_cropped(model, images, shown))


def one_at_a_time_cropped(model, images, shown):
    store = ImageStore(images)
    for e in shown:
        x, y, w, h = e['box']
        with torch.inference_mode():
            v = model.encode_image(model.preprocess(store.open(e['image']).crop((x, y, x + w, y + h)))[None])
            p, n = (model.encode_text(model.tokenize([t])) for t in e['texts'])
        yield (v @ p.T).item() > (v @ n.T).item()


def test_intervals_draw_pictures():
    rng = np.random.default_rng(0)
    correct, subset, image = rng.integers(0, 2, 400), rng.integers(0, 2, 400), rng.integers(0, 100, 400)
    a = intervals(correct, subset, image, seed=3)
    assert a.shape == (3, 2) and np.array_equal(a, intervals(correct, subset, image, seed=3))
    assert not np.array_equal(a, intervals(correct, subset, image, seed=4))
    means = correct[subset == 0].mean(), correct[subset == 1].mean(), correct.mean()
    assert all(low < mean < high for (low, high), mean in zip(a, means))
    assert np.array_equal(intervals(np.ones(5), np.zeros(5, int), np.zeros(5, int)), np.ones((2, 2)))


@pytest.fixture
def broken(tmp_path):
    for name in ('0.png', '1.png'): (tmp_path/name).write_bytes(png('red'))
    (tmp_path/'cut.png').write_bytes((tmp_path/'0.png').read_bytes()[:60])
    return tmp_path


@pytest.mark.parametrize('image, box, message', [
    ('gone.png', None, 'no image "gone.png"'), ('cut.png', None, 'image "cut.png" is truncated'),
    ('0.png', (32, 0, 5, 5), 'image "0.png": box [32, 0, 5, 5]')])
def test_a_picture_that_cannot_be_opened(model, broken, image, box, message):
    parts = ('0.png', None), (image, box), ('1.png', None)
    items = [Choice(str(i), 'a', name, ('a cat', 'a dog'), part) for i, (name, part) in enumerate(parts)]
    b = Benchmark('toy', items, broken, {'a': 3})
    with pytest.raises(CSClipError) as e: evaluate(model, b)
    assert message in str(e.value)
    embedder = Embedder(model)
    result = evaluate(embedder, b, missing='skip')
    assert result['subsets']['a']['n'] == 2 and result['provenance']['counts']['items_without_picture'] == 1 and not result['complete']
    with pytest.raises(CSClipError): evaluate(embedder, b)  # it is no less missing for having been skipped before


def test_clipped_boxes_are_counted(model, broken):
    items = [Choice(str(i), 'a', '0.png', ('a cat', 'a dog'), (i, 0, 30, 20)) for i in range(5)]
    assert evaluate(model, Benchmark('toy', items, broken, {'a': 5}))['provenance']['counts']['boxes_clipped'] == 2


def test_a_subset_of_which_nothing_is_left(model, images):
    items = [c for c in choices() if c.subset == 'a'] + [Choice('x', 'b', 'gone.png', ('a cat', 'a dog'))]
    with pytest.raises(CSClipError, match='toy: no item of b is left'): evaluate(model, benchmark(images, items), missing='skip')
    with pytest.raises(CSClipError, match='toy: no item of a, b is left'): evaluate(model, benchmark(images, []))


def test_embeddings_that_are_no_numbers(model, images):
    class Broken(Counting):
        def encode_text(self, x): return self.model.encode_text(x)*torch.nan
    with pytest.raises(CSClipError, match='text "a .*": the model\'s embedding is not finite'): evaluate(Broken(model), benchmark(images))
    class Blind(Counting):
        def encode_image(self, x): return self.model.encode_image(x)/0*0
    with pytest.raises(CSClipError, match='image "0.png": the model\'s embedding is not finite'): evaluate(Blind(model), benchmark(images))


def test_a_result_says_how_its_model_was_trained(model, images):
    class Trained(Counting): trained = {'parameters': {'method': 'sg', 'lr': 1e-5}, 'supervision': 'abc', 'base_model': 'def'}
    assert evaluate(model, benchmark(images))['provenance']['training'] is None
    assert evaluate(Trained(model), benchmark(images))['provenance']['training'] == Trained.trained


def test_unknown_policy(model, images):
    with pytest.raises(CSClipError, match="missing 'ignore': expected"): evaluate(model, benchmark(images), missing='ignore')


@pytest.mark.parametrize('run, method, seed', [('clip', 'clip', None), ('clip_ft-0', 'clip_ft', 0), ('sg-random-2', 'sg', 2)])
def test_result_files(model, images, tmp_path, run, method, seed):
    path = result_file(tmp_path, evaluate(model, benchmark(images)), run, 'toy')
    result = read_json(path)
    assert path == tmp_path/run/'toy.json'
    assert (result['run'], result['method'], result['seed'], result['world']) == (run, method, seed, 'toy')
    assert {'benchmark', 'subsets', 'avg', 'std', 'metrics', 'provenance'} <= set(result)
    assert {'code_version', 'data', 'model', 'preprocessing', 'parameters'} <= set(result['provenance'])
    assert str(images) not in json.dumps(result)  # a result names no place
    before = path.read_bytes()
    assert result_file(tmp_path, evaluate(model, benchmark(images)), run, 'toy').read_bytes() == before


@pytest.mark.parametrize('run', ['', '..', '../escape', 'a/b', '/escape'])
def test_a_run_is_a_plain_name(tmp_path, run):
    "Nothing is written outside the folder of results."
    with pytest.raises(CSClipError, match='expected a plain name'): result_file(tmp_path/'results', {'benchmark': 'toy'}, run, 'toy')
    assert not list(tmp_path.iterdir())


def test_batches_hold_something(model):
    with pytest.raises(CSClipError, match='batch_size is 0; expected 1 or more'): Embedder(model, 0)

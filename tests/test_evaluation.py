"Scores against hand-computed ones and the SugarCrepe authors' way; each picture and text once; faults by name."
import io, json, zipfile
import numpy as np, open_clip, pytest, torch
from cs_clip.benchmarks import SUGAR_CREPE, Benchmark, Choice, retrieval, sugar_crepe, zero_shot
from cs_clip.data import ImageStore, Record, Records
from cs_clip.evaluation import (
    _PAIR_CHANCE, BlindReader, Embedder, _OneDNN, _trees, chance, choice_scores, cohens_d, encode_shared, evaluate, headline, intervals,
    margins, overlap, paired_difference, paired_margins, ranks, recall_at_k, result_file, same_bag, text_margins, verdicts)
from cs_clip.files import CSClipError, project_root, read_json, write_json
from cs_clip.models import DualEncoder, load
from PIL import Image
from tiny_clip import captions, png, tiny_clip, tiny_transformers


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


@pytest.mark.parametrize('vision', ['resnet', 'vit'])
def test_texts_that_share_their_beginnings_are_embedded_as_ever(tmp_path, vision):
    model, texts = load(tiny_clip(tmp_path, vision)), [*captions(), 'a red', 'a red cat', 'cup', 'a mug next to a cat '*9]
    tokens = model.tokenize(texts)
    expected = torch.cat([model.encode_text(t[None]) for t in tokens]).detach()
    for order in (sorted(range(len(texts)), key=lambda i: tokens[i].tolist()), range(len(texts))):
        assert torch.allclose(encode_shared(model, tokens[list(order)]), expected[list(order)], atol=2e-6)
    found, rows = Embedder(model, 9).texts(texts)
    assert torch.allclose(found[rows], expected, atol=2e-6)


def test_large_layers_by_another_library(model, monkeypatch):
    texts = captions()
    expected = model.encode_text(model.tokenize(texts)).detach()
    monkeypatch.setattr(_OneDNN, 'large', 1)
    with torch.inference_mode(), (mode := _OneDNN()):
        found = model.encode_text(model.tokenize(texts))
        assert len(mode.packed) > 3 or not mode.there
    assert torch.allclose(found, expected, atol=2e-6) and not mode.packed


def test_a_common_beginning_is_computed_once():
    rows = sorted([[1, 5, 6, 9], [1, 5, 7, 9], [1, 8, 9], [2, 5, 6, 9]])
    tree, = _trees(rows)
    assert len(tree.ids) == 4 + 2 + 2 + 4
    for row, end in zip(rows, tree.ends):  # from the end up to the root stands the text
        path = [end]
        while tree.parents[path[-1]] is not None: path.append(tree.parents[path[-1]])
        assert [tree.ids[i] for i in path[::-1]] == row and [tree.depths[i] for i in path[::-1]] == list(range(len(row)))
    assert [len(t.ids) for t in _trees(rows, room=6)] == [6, 3, 4] and len(_trees(rows, room=1)) == 4


@pytest.mark.parametrize('name, n', [('local-dir:data/models/clip', 25), ('ViT-B-32', 2)])
def test_verdicts_are_those_of_sugar_crepes_authors(name, n):
    "Their evaluate.py, on the embedded world and through open_clip's own encoders: an item alone, texts at full length."
    world = project_root()/'data/icon_world'
    if not (world/'sugar_crepe').exists(): pytest.skip('the embedded data is not pulled')
    torch.manual_seed(0)
    if 'data' in name: model = load(name)
    else: model = DualEncoder(open_clip.create_model(name).eval(), open_clip.get_model_config(name), open_clip.get_tokenizer(name))
    whole = sugar_crepe(world/'sugar_crepe', world/'test.zip')
    items, store, said = [c for k in SUGAR_CREPE for c in [c for c in whole.choices if c.subset == k][:n]], ImageStore(world/'test.zip'), ''
    with torch.inference_mode():
        for c in items:
            v = model.clip.encode_image(model.preprocess(store.open(c.image))[None], normalize=True)
            right, wrong = ((v @ model.clip.encode_text(model.tokenize([t]), normalize=True).T).item() for t in c.texts)
            said += '1' if right > wrong else '=' if right == wrong else '0'
    result = evaluate(Embedder(model, 16), Benchmark('sugar_crepe', items, whole.images, dict.fromkeys(SUGAR_CREPE, n)))
    assert ''.join(result['verdicts']['i2t']) == said and '0' in said and '1' in said


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
    result = evaluate(model, benchmark(images, choices(80, box=(1, 2, 20, 16)), kind='controlled', examples=24))
    assert all(isinstance(s['cohens_d'], float) and isinstance(s['margin'], float) for s in result['subsets'].values())
    shown = result['examples']
    assert [e['id'] for e in shown] == [str(i) for i in range(2*24)] and shown[0]['box'] == [1, 2, 20, 16]
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
    counts, absent = result['provenance']['counts'], image == 'gone.png'
    assert result['subsets']['a']['n'] == 2 and not result['complete']
    assert counts['items_without_picture'] == absent and counts.get('items_with_unreadable_picture', 0) == (not absent)
    said, = (line for line in headline(result).splitlines() if line.startswith('left out: '))
    assert said == f'left out: 1 {"without picture" if absent else "with unreadable picture"}, first {image}'
    with pytest.raises(CSClipError): evaluate(embedder, b)  # it is no less missing for having been skipped before


def test_absent_and_unreadable_pictures_are_told_apart(model, broken):
    names = ['0.png', 'gone.png', 'cut.png', '1.png', 'lost.png']
    b = Benchmark('toy', [Choice(str(i), 'a', name, ('a cat', 'a dog')) for i, name in enumerate(names)], broken, {'a': 5})
    result = evaluate(model, b, missing='skip')
    assert result['left_out'] == {'without_picture': {'n': 2, 'first': 'gone.png'}, 'with_unreadable_picture': {'n': 1, 'first': 'cut.png'}}
    nothing = Benchmark('toy', [c for c in b.choices if c.image not in ('0.png', '1.png')], broken, {'a': 3})
    with pytest.raises(CSClipError, match='no item of a is left of 3; 2 without picture, first gone.png; 1 with unreadable picture, first cut.png; are'):
        evaluate(model, nothing, missing='skip')
    whole = Benchmark('toy', [c for c in b.choices if c.image in ('0.png', '1.png')], broken, {'a': 2})
    assert 'left_out' not in evaluate(model, whole, missing='skip')


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


# More than one picture or right text, what a score is worth, two runs, leakage, the disk -------------------------------------------------

def unit(*rows): return torch.nn.functional.normalize(torch.tensor(rows, dtype=torch.float32), dim=-1)


def test_two_captions_and_a_negative_by_hand():
    scores = torch.tensor([[.9, .8, .7], [.9, .6, .7], [.7, .9, .7]])
    assert [x.tolist() for x in verdicts(margins(scores, right=2))] == [[True, False, False], [False, False, True]]
    near, far = unit([1, 0], [1, .1], [0, 1]), unit([1, 0], [0, 1], [1, .1])
    right, tied = verdicts(text_margins(torch.stack([near, far, unit([1, 0], [0, 1], [0, 1])])))
    assert right.tolist() == [True, False, False] and tied.tolist() == [False, False, False]
    assert verdicts(text_margins(unit([1, 0], [1, 0], [1, 0])[None]))[1].item()


@pytest.mark.parametrize('scores, i2t, t2i', [ # c0_i0, c1_i0 / c0_i1, c1_i1
    ([[.9, .1], [.2, .8]], True, True), ([[.9, .1], [.95, .99]], True, False), ([[.9, .95], [.2, .99]], False, True),
    ([[.1, .9], [.8, .2]], False, False), ([[.9, .9], [.2, .99]], False, True)])
def test_winograd_scores_by_hand(scores, i2t, t2i):
    m = {k: x.item() for k, x in paired_margins(torch.tensor(scores)[None]).items()}
    assert (m['i2t'] > 0, m['t2i'] > 0, m['group'] > 0) == (i2t, t2i, i2t and t2i)


def test_chance_by_counting():
    rng = np.random.default_rng(0)
    for texts, right in ((2, 1), (4, 1), (3, 2), (5, 2)):
        scores = torch.tensor(rng.random((20_000, texts)))
        assert verdicts(margins(scores, right))[0].double().mean().item() == pytest.approx(chance(texts, right), abs=.02)
    found = paired_margins(torch.tensor(rng.random((20_000, 2, 2))))
    for k, p in _PAIR_CHANCE.items(): assert (found[k] > 0).double().mean().item() == pytest.approx(p, abs=.02)


def test_a_benchmark_of_two_captions(model, images):
    texts = captions()
    items = [Choice(str(i), 'ab'[i % 2], f'{i % 8}.png', tuple(texts[(7*i + k) % 72] for k in (0, 11, 23)), right=2) for i in range(40)]
    result = evaluate(model, Benchmark('plus', items, images, {'a': 20, 'b': 21}))
    itt, tot, store = [], [], ImageStore(images)
    with torch.inference_mode():
        for c in items:
            v, (p, q, n) = model.encode_image(model.preprocess(store.open(c.image))[None])[0], model.encode_text(model.tokenize(c.texts))
            itt.append(bool(v @ p > v @ n and v @ q > v @ n))
            tot.append(bool(p @ q > p @ n and p @ q > q @ n))
    assert result['subsets']['a']['accuracy'] == pytest.approx(np.mean(itt[::2]), abs=1e-6)
    assert result['subsets']['b']['tot'] == pytest.approx(np.mean(tot[1::2]), abs=1e-6)
    assert ''.join(result['verdicts']['itt']) == ''.join('01'[x] for x in itt) and ''.join(result['verdicts']['tot']) == ''.join('01'[x] for x in tot)
    assert result['incomplete'] == ['b: 20 of 21'] and 'INCOMPLETE (b: 20 of 21)' in headline(result)
    assert result['metrics']['chance'] == pytest.approx(1/3, abs=1e-6)


def test_two_pictures_two_texts(model, images):
    texts = captions()
    items = [Choice(str(i), 'pairs', f'{i % 8}.png', (texts[i], texts[i + 1]), group='ab'[i % 2], others=(f'{(i + 3) % 8}.png',)) for i in range(30)]
    result, store = evaluate(model, Benchmark('pairs', items, images, dict.fromkeys(('i2t', 't2i', 'group'), 30), 'paired')), ImageStore(images)
    with torch.inference_mode():
        s = [(torch.cat([model.encode_image(model.preprocess(store.open(n))[None]) for n in (c.image, *c.others)])
              @ model.encode_text(model.tokenize(c.texts)).T).tolist() for c in items]
    i2t = [a > b and d > c for (a, b), (c, d) in s]
    t2i = [a > c and d > b for (a, b), (c, d) in s]
    for k, right in (('i2t', i2t), ('t2i', t2i), ('group', [x and y for x, y in zip(i2t, t2i)])):
        assert result['subsets'][k]['accuracy'] == result['metrics'][k] == pytest.approx(np.mean(right), abs=1e-6)
    assert result['avg'] == result['metrics']['group'] == result['metrics']['micro'] and result['complete']
    gone = [items[0]._replace(others=('gone.png',)), *items[1:]]
    result = evaluate(model, Benchmark('pairs', gone, images, dict.fromkeys(('i2t', 't2i', 'group'), 30), 'paired'), missing='skip')
    assert result['verdicts']['group'][0][0] == '-' and result['incomplete'] == [f'{k}: 29 of 30' for k in ('i2t', 't2i', 'group')]


def test_items_with_different_numbers_of_texts(model, images):
    items = choices(20)
    longer = [c._replace(id=f'long {c.id}', texts=(*c.texts, *captions()[-3:])) for c in items]
    both, store = evaluate(model, benchmark(images, [*items, *longer])), ImageStore(images)
    assert ''.join(both['verdicts']['i2t'])[:20] == ''.join(evaluate(model, benchmark(images, items))['verdicts']['i2t'])
    with torch.inference_mode():
        for c, said in zip(longer, ''.join(both['verdicts']['i2t'])[20:]):
            s = model.encode_image(model.preprocess(store.open(c.image))[None]) @ model.encode_text(model.tokenize(c.texts)).T
            assert (said == '1') == (s.argmax().item() == 0)
    assert both['subsets']['a']['chance'] == pytest.approx((1/2 + 1/5)/2)


def test_zero_shot_averages_prompts(model, images, tmp_path):
    names = 'cat', 'dog', 'mug'
    with zipfile.ZipFile(images) as z:
        for i, name in enumerate(z.namelist()):
            (folder := tmp_path/names[i % 3]).mkdir(exist_ok=True)
            (folder/name).write_bytes(z.read(name))
    (tmp_path/'templates.txt').write_text('a red {}\na {} next to a cup\n')
    result = evaluate(model, b := zero_shot(tmp_path))
    with torch.inference_mode():
        classes = torch.stack([torch.nn.functional.normalize(model.encode_text(model.tokenize([f'a red {c}', f'a {c} next to a cup'])).mean(0), dim=0)
                               for c in names])
        best = [(model.encode_image(model.preprocess(ImageStore(tmp_path).open(c.image))[None]) @ classes.T).argmax().item() for c in b.choices]
    right = np.array([names[i] == c.group for i, c in zip(best, b.choices)])
    assert result['metrics']['acc1'] == result['avg'] == pytest.approx(right.mean(), abs=1e-6) and result['metrics']['acc5'] == 1
    assert result['metrics']['macro'] == pytest.approx(np.mean([right[[c.group == g for c in b.choices]].mean() for g in names]), abs=1e-6)


def test_the_blind_reader_adds_masked_log_probabilities(bert_mlm, model, images, tmp_path):
    from transformers import AutoModelForMaskedLM, AutoTokenizer
    tokenizer, mlm = AutoTokenizer.from_pretrained(bert_mlm), AutoModelForMaskedLM.from_pretrained(bert_mlm).eval()
    texts = ['a red dog', 'a dog next to a man', 'the cats is holding']
    expected = []
    for text in texts:
        ids, total = tokenizer(text, return_tensors='pt').input_ids, 0
        for place in range(1, ids.shape[1] - 1):
            masked = ids.clone()
            masked[0, place] = tokenizer.mask_token_id
            with torch.inference_mode(): total += mlm(input_ids=masked).logits[0, place].log_softmax(-1)[ids[0, place]].item()
        expected.append(total)
    reader = BlindReader(bert_mlm, batch_size=3, cache=tmp_path)
    assert reader(texts + texts[:1]) == pytest.approx(expected + expected[:1], abs=1e-4)
    again = BlindReader(bert_mlm, cache=tmp_path)
    again._read = None  # what is on disk is not read again
    assert again(texts).tolist() == reader(texts).tolist()
    items = [Choice(str(i), 'a', f'{i}.png', (texts[i], texts[(i + 1) % 3])) for i in range(3)]
    result = evaluate(model, Benchmark('toy', items, images, {'a': 3}), blind=reader)
    assert result['subsets']['a']['blind'] == pytest.approx(np.mean([expected[i] > expected[(i + 1) % 3] for i in range(3)]), abs=1e-6)
    assert result['provenance']['blind'] == reader.digest and 'blind' in headline(result)


def test_what_is_the_same_bag():
    assert same_bag('A red cat and a blue dog.', 'a blue cat and a red dog') and not same_bag('a cat on a dog', 'a cat on the dog')
    assert not same_bag('a a cat', 'a cat')


def test_the_difference_of_two_runs(model, images, tmp_path):
    other, items = load(tiny_clip(tmp_path, seed=1)), choices(200)
    b = benchmark(images, items)
    x, y = evaluate(model, b), evaluate(other, b)
    found = paired_difference(x, y, b)['i2t']
    right = [np.array(one_at_a_time(m, ImageStore(images), items)).astype(int) for m in (model, other)]
    assert found['all']['difference'] == pytest.approx((right[0] - right[1]).mean(), abs=1e-6) == pytest.approx(x['avg'] - y['avg'], abs=2e-6)
    assert (found['all']['only_a'], found['all']['only_b']) == (int((right[0] > right[1]).sum()), int((right[0] < right[1]).sum()))
    assert found['a']['n'] == 100 and found['all']['interval'][0] <= found['all']['difference'] <= found['all']['interval'][1]
    assert paired_difference(x, x, b)['i2t']['all'] == {'difference': 0, 'interval': [0, 0], 'n': 200, 'only_a': 0, 'only_b': 0}
    fewer = evaluate(other, benchmark(images, items[:-2]))
    with pytest.raises(CSClipError, match='measured on other data than this toy'): paired_difference(x, fewer, b)


def test_the_difference_of_two_runs_in_retrieval(model, images, tmp_path):
    texts, n = captions(), iter(range(99))
    said = [[{'raw': texts[3*i + k], 'sentid': next(n)} for k in range(1 + i % 3)] for i in range(8)]
    entries = [{'filename': f'{i}.png', 'split': 'test', 'sentences': s} for i, s in enumerate(said)]
    write_json(tmp_path/'k.json', {'images': entries})
    b, other = retrieval(tmp_path/'k.json', 'test', images), load(tiny_clip(tmp_path, seed=1))
    x, y = evaluate(model, b), evaluate(other, b)
    found = paired_difference(x, y, b)
    for d in ('i2t', 't2i'):
        assert found[d]['all']['difference'] == pytest.approx(x['metrics'][f'{d}_r1'] - y['metrics'][f'{d}_r1'], abs=2e-6)
    assert found['t2i']['all']['n'] == sum(len(e['sentences']) for e in entries)
    assert x['definition'][0].startswith('split test: 8 pictures, 15 captions') and 'recall@k' in headline(x)


def test_overlap_with_training(images, tmp_path):
    names = ['000000000007.png', '000000000008.png', '9.png']
    for name, color in zip(names, ('red', 'blue', 'lime')): (tmp_path/name).write_bytes(png(color))
    train = tmp_path/'train'
    train.mkdir()
    (train/'COCO_val2014_000000000007.png').write_bytes(png('pink'))  # a number alone
    Image.new('RGB', (32, 32), 'lime').save(train/'x.bmp')  # the same pixels under another name and in another format
    records = Records([Record('COCO_val2014_000000000007.png', ('A red cat!', 'a cup'), (0, 1)), Record('x.bmp', ('a mug',), (2,)),
                       Record('gone.png', ('-',), (3,))])
    items = [Choice(str(i), 'ab'[i % 2], name, (text, 'a cup')) for i, (name, text) in enumerate(zip(names, ('a red  cat', 'a dog', 'a hat')))]
    found = overlap(records, Benchmark('toy', items, tmp_path, {'a': 2, 'b': 1}), train)
    assert found['pictures'] == {'n': 3, 'by_id': 1, 'by_content': 1, 'unreadable': 1} and found['captions'] == {'n': 3, 'shared': 1}
    assert found['items'] == {'a': {'n': 2, 'by_id': 1, 'by_content': 1, 'caption': 1}, 'b': {'n': 1, 'by_id': 0, 'by_content': 0, 'caption': 0}}
    assert overlap(records, Benchmark('toy', items, tmp_path, {'a': 2, 'b': 1}))['pictures']['by_content'] is None


def test_embeddings_on_disk(model, images, tmp_path):
    items = choices(40, box=(2, 2, 30, 60))
    first = evaluate(Embedder(model, 7, cache=tmp_path), benchmark(images, items))
    counting = Counting(model)
    again = evaluate(Embedder(counting, 7, cache=tmp_path), benchmark(images, items))
    assert again == first == evaluate(Embedder(model, 7), benchmark(images, items)) and first['provenance']['counts']['boxes_clipped'] == 8
    assert counting.pictures == counting.sentences == 0
    other = load(tiny_clip(tmp_path/'other', seed=1))
    assert evaluate(Embedder(other, 7, cache=tmp_path), benchmark(images, items)) == evaluate(Embedder(other, 7), benchmark(images, items))


def test_a_killed_run_goes_on_where_it_was(model, images, tmp_path):
    class Killed(Counting):
        def encode_text(self, x):
            if self.sentences >= 20: raise KeyboardInterrupt
            return super().encode_text(x)
    items = choices(60)
    with pytest.raises(KeyboardInterrupt): evaluate(Embedder(Killed(model), 5, cache=tmp_path), benchmark(images, items))
    torn = next(tmp_path.rglob('*.npz'))
    torn.write_bytes(torn.read_bytes()[:40])
    counting = Counting(model)
    result = evaluate(Embedder(counting, 5, cache=tmp_path), benchmark(images, items))
    distinct = len({t for c in items for t in c.texts})
    assert 0 < counting.sentences + counting.pictures <= distinct - 20 + 8 and result == evaluate(Embedder(model, 5), benchmark(images, items))


def test_another_picture_of_the_same_name_is_embedded_anew(model, tmp_path):
    (tmp_path/'1.png').write_bytes(png('red'))
    first = Embedder(model, cache=tmp_path/'cache').images(tmp_path, [('1.png', None)])['1.png', None]
    (tmp_path/'1.png').write_bytes(png('blue'))
    assert not torch.equal(first, Embedder(model, cache=tmp_path/'cache').images(tmp_path, [('1.png', None)])['1.png', None])


def test_a_result_never_replaces_another_models(model, images, tmp_path):
    other = load(tiny_clip(tmp_path/'m', seed=1))
    path = result_file(tmp_path, evaluate(model, benchmark(images)), 'sg-0', 'toy')
    theirs = evaluate(other, benchmark(images))
    with pytest.raises(CSClipError, match='toy.json: holds the result of another model'): result_file(tmp_path, theirs, 'sg-0', 'toy')
    assert read_json(path)['provenance']['model'] == model.digest
    assert read_json(result_file(tmp_path, theirs, 'sg-0', 'toy', replace=True))['provenance']['model'] == other.digest


@pytest.mark.parametrize('change, said', [
    (dict(world='Mars'), 'world'), (dict(data='0'), 'data'), (dict(head='other'), 'head'), (dict(missing='skip'), '`missing`'), (dict(blind=None), 'blind reader')])
def test_a_result_never_replaces_one_of_something_else(model, images, tmp_path, change, said):
    result = evaluate(model, benchmark(images))
    result['provenance']['blind'] = 'abc'
    before = result_file(tmp_path, result, 'sg-0', 'toy').read_bytes()
    changed = json.loads(json.dumps(result))
    if 'missing' in change: changed['provenance']['parameters']['missing'] = 'skip'
    changed['provenance'] |= {k: v for k, v in change.items() if k not in ('world', 'missing')}
    with pytest.raises(CSClipError, match=f'another {said};'): result_file(tmp_path, changed, 'sg-0', change.get('world', 'toy'))
    assert (tmp_path/'sg-0/toy.json').read_bytes() == before
    result_file(tmp_path, result, 'sg-0', 'toy') # the same again is no other


# A model of several vectors a picture, and one that sees both at once -------------------------------------------------------------------

@pytest.fixture(scope='module')
def blip2(tmp_path_factory): return load(tiny_transformers(tmp_path_factory.mktemp('blip2'), 'blip-2'))


@torch.inference_mode()
def by_hand(model, store, names, texts):
    "BLIP-2's two heads for each picture with each text, one picture at a time."
    pixels, tokens = torch.stack([model.preprocess(store.open(n)) for n in names]), model.tokenize(texts)
    contrastive = [[(v @ t).max().item() for t in model.encode_text(tokens)] for v in model.encode_image(pixels)]
    return torch.tensor(contrastive), torch.cat([model.scores(p[None], tokens[None]) for p in pixels])


@pytest.mark.parametrize('matching', [False, True])
def test_both_of_blip_2s_heads_on_choices_and_pairs(blip2, images, tmp_path, matching):
    store, items = ImageStore(images), choices(12)
    pairs = [Choice(str(i), 'pairs', f'{i}.png', (captions()[i], captions()[i + 9]), others=(f'{i + 4}.png',)) for i in range(4)]
    asked = Benchmark('pairs', pairs, images, dict.fromkeys(('i2t', 't2i', 'group'), 4), 'paired')
    embedder = Embedder(blip2, 5, cache=tmp_path, matching=matching)
    result, paired = evaluate(embedder, benchmark(images, items)), evaluate(embedder, asked)
    own = [by_hand(blip2, store, [c.image], c.texts)[matching][0] for c in items]
    for name, s in result['subsets'].items():
        assert s['margin'] == pytest.approx(np.mean([(x[0] - x[1]).item() for x, c in zip(own, items) if c.subset == name]), abs=1e-5)
    theirs = paired_margins(torch.stack([by_hand(blip2, store, [c.image, *c.others], c.texts)[matching] for c in pairs]))
    for k, m in theirs.items(): assert paired['subsets'][k]['margin'] == pytest.approx(m.mean().item(), abs=1e-5)
    assert result['provenance']['head'] == ('matching' if matching else 'embedding')
    counting = Counting(blip2)
    counting.scores = None  # all of it is on disk
    assert evaluate(Embedder(counting, 5, cache=tmp_path, matching=matching), benchmark(images, items)) == result
    assert counting.pictures == counting.sentences == 0


def test_retrieval_and_zero_shot_of_several_vectors_a_picture(blip2, images):
    store, names, texts = ImageStore(images), [f'{i}.png' for i in range(8)], captions()[:16]
    whole = by_hand(blip2, store, names, texts)[0]
    items = [Choice(n, 'test', n, (texts[2*i], texts[2*i + 1])) for i, n in enumerate(names)]
    found = evaluate(blip2, Benchmark('retrieval', items, images, {'i2t': 8, 't2i': 16}, 'retrieval'))['metrics']
    assert found['t2i_r1'] == pytest.approx((whole.argmax(0) == torch.arange(16)//2).double().mean().item())
    assert found['i2t_r1'] == pytest.approx((whole.argmax(1)//2 == torch.arange(8)).double().mean().item())
    classes = [Choice(n, 'zero_shot', n, (texts[i % 4],), group=str(i % 4)) for i, n in enumerate(names)]
    asked = Benchmark('zero_shot', classes, images, {'zero_shot': 8}, 'zero_shot')
    assert evaluate(blip2, asked)['avg'] == pytest.approx((whole[:, :4].argmax(1) == torch.arange(8) % 4).double().mean().item())
    with pytest.raises(CSClipError, match='zero_shot: a head that sees a picture and a text at once'): evaluate(Embedder(blip2, matching=True), asked)


def test_texts_of_several_benchmarks_are_tokenised_once(model, images):
    class Splitting(Counting):
        split = 0
        def tokenize(self, texts): self.split += len(texts); return self.model.tokenize(texts)
    counting = Splitting(model)
    embedder, distinct = Embedder(counting), {t for c in choices() for t in c.texts}
    for _ in range(2): evaluate(embedder, benchmark(images))
    assert counting.split == len(distinct)


# Pictures as they come -------------------------------------------------------------------------------------------------------------------

def odd_pictures(folder):
    "One picture, told in every way a file may hold it."
    pixels = np.zeros((24, 40, 3), np.uint8)
    pixels[:, :20], pixels[:, 20:] = 200, 40
    plain = Image.fromarray(pixels)
    plain.save(folder/'plain.png')
    plain.convert('CMYK').save(folder/'cmyk.tif')
    plain.quantize(4).save(folder/'palette.png')
    Image.fromarray(pixels[..., 0].astype(np.uint16)*257).save(folder/'deep.png')
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    plain.transpose(Image.Transpose.ROTATE_90).save(folder/'turned.png', exif=exif)
    plain.save(folder/'moving.gif', save_all=True, append_images=[Image.new('RGB', plain.size, 'red')])


@pytest.mark.parametrize('name', ['cmyk.tif', 'palette.png', 'deep.png', 'turned.png', 'moving.gif'])
def test_however_a_picture_is_stored_it_is_embedded_alike(model, tmp_path, name):
    odd_pictures(tmp_path)
    Image.new('RGB', (40, 24), 'white').save(tmp_path/'white.png')
    plain, odd, white = Embedder(model).images(tmp_path, [(n, None) for n in ('plain.png', name, 'white.png')]).values()
    assert (plain - odd).norm() < .05*(plain - white).norm()


def test_scores_that_are_no_numbers_are_named_whatever_the_head(blip2, images):
    class Broken(Counting):
        def encode_image(self, x):
            v = super().encode_image(x)
            v[0, 1, 0] = torch.nan
            return v
        def scores(self, pixels, tokens): return self.model.scores(pixels, tokens)*torch.inf
    with pytest.raises(CSClipError, match='image "0.png": the model\'s embedding is not finite'): evaluate(Broken(blip2), benchmark(images))
    with pytest.raises(CSClipError, match='image "0.png" with its texts: the model\'s embedding is not finite'):
        Embedder(Broken(blip2), matching=True).matches(images, [('0.png', None)], [captions()[:2]])


def test_a_killed_matching_goes_on_where_it_was(blip2, images, tmp_path):
    class Killed(Counting):
        seen, limit = 0, 24
        def scores(self, pixels, tokens):
            if self.seen >= self.limit: raise KeyboardInterrupt
            self.seen += len(pixels)
            return self.model.scores(pixels, tokens)
    first, again, items = Killed(blip2), Killed(blip2), choices(40)
    with pytest.raises(KeyboardInterrupt): evaluate(Embedder(first, 5, cache=tmp_path, matching=True), benchmark(images, items))
    again.limit = 99
    assert evaluate(Embedder(again, 5, cache=tmp_path, matching=True), benchmark(images, items)) == evaluate(Embedder(blip2, 5, matching=True), benchmark(images, items))
    assert 0 < again.seen <= 40 - 24 + 16


def test_what_makes_margins_probabilities(model, blip2, images):
    assert evaluate(model, benchmark(images))['scale'] == pytest.approx(model.logit_scale.exp().item(), rel=1e-5)
    assert evaluate(blip2, benchmark(images))['scale'] is None and evaluate(Embedder(blip2, matching=True), benchmark(images))['scale'] == 1

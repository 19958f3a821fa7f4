"Hard negatives: exact edits, seven kinds, any text models, no dependence on batches, shards that go on where they stopped."
import json
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import bert, wordpiece
from hypothesis import given, settings, strategies as st
from transformers import BertForSequenceClassification

from cs_clip import generation as gen
from cs_clip.data import load_supervision
from cs_clip.files import UNFINISHED, CSClipError, write_shard
from cs_clip.parsing import COLOURS, SCHEMA, Attribute, Object, Relation, SceneGraph, SceneGraphParser, Span

PARSER = SceneGraphParser()

def graph(caption, objects=(), attributes=(), relations=()):
    "By hand: objects as noun phrases whose last word is the head, attributes as (word, object), relations as (text, subject, object)."
    def at(text, inside=Span(caption, 0, len(caption))):
        start = inside.start + inside.text.index(text)
        return Span(text, start, start + len(text))
    phrases = [at(p) for p in objects]
    heads = [Span(p.text.split()[-1], p.end - len(p.text.split()[-1]), p.end) for p in phrases]
    things = tuple(Object(h.text, h.start, h.end, p, 'plural' if h.text.endswith('s') else 'singular') for h, p in zip(heads, phrases))
    said = tuple(Attribute(w, (s := at(w, phrases[o])).start, s.end, o) for w, o in attributes)
    return SceneGraph(caption, things, said, tuple(Relation((at(t),), s, o) for t, s, o in relations))

CAR = graph('An orange car to the left of a blue umbrella.', ['An orange car', 'a blue umbrella'], [('orange', 0), ('blue', 1)],
            [('to the left of', 0, 1)])
RIDER = graph('a man is riding a horse', ['a man', 'a horse'], [], [('riding', 0, 1)])
PAIR = graph('a dog and a cat', ['a dog', 'a cat'])
GRAPHS = [CAR, RIDER, PAIR, graph('Two red dogs', ['Two red dogs'], [('Two', 0), ('red', 0)]), graph('nothing here')]

class Fake:
    "Proposes the same words for every slot of a category, whatever they mean."
    digest = 'fake'
    def __init__(self, **words): self.words = words
    def __call__(self, slots): return [[gen.Candidate(w, n, .5) for n, w in enumerate(self.words.get(s.categories[0], ()))] for s in slots]

def verdict(contradiction): return gen.Verdict(0., round(1 - contradiction, 4), contradiction)

class Likes:
    "Finds texts with a certain word contradictory."
    digest = 'likes'
    def __init__(self, word): self.word = word
    def __call__(self, pairs): return [verdict(float(self.word in text.split())) for _, text in pairs]

FAKE = Fake(noun=['apple'], adjective=['green'], preposition=['under'], verb=['holding'], numeral=['three'])

def made(g, propose, rank=gen.FirstRank(), **kw):
    negatives, skipped = next(gen.HardNegatives(None, propose, rank, **kw).from_graphs([g]))
    return {n.kind: n for n in negatives}, skipped

def test_seven_kinds_of_one_caption():
    found, skipped = made(CAR, Fake(noun=['apple'], adjective=['red'], preposition=['above']))
    texts = {k: n.text for k, n in found.items()}
    assert texts['replace_obj'] in ('An orange apple to the left of a blue umbrella.', 'An orange car to the left of a blue apple.')
    assert texts['replace_att'] in ('A red car to the left of a blue umbrella.', 'An orange car to the left of a red umbrella.')
    assert texts['replace_rel'] == 'An orange car above a blue umbrella.'
    assert texts['swap_obj'] == 'An orange umbrella to the left of a blue car.'
    assert texts['swap_att'] == 'A blue car to the left of an orange umbrella.'
    assert texts['add_obj'] in ('An orange car and an apple to the left of a blue umbrella.',
                                'An orange car to the left of a blue umbrella and an apple.')
    assert texts['add_att'] in ('An orange and red car to the left of a blue umbrella.',
                                'An orange car to the left of a blue and red umbrella.')
    assert skipped == {}

def test_every_negative_is_its_caption_but_for_the_span():
    for g in GRAPHS:
        for seed in range(5):
            found, _ = made(g, FAKE, seed=seed)
            for n in found.values():
                assert n.caption[n.start:n.end] == n.original
                assert n.caption[:n.start] + n.replacement + n.caption[n.end:] == n.text != n.caption
                assert n.text[:1].isupper() == n.caption[:1].isupper()

def test_what_cannot_be_made_says_why():
    found, skipped = made(PAIR, Fake())
    assert found == {} and skipped['replace_obj'] == skipped['add_obj'] == gen.NO_CANDIDATE
    assert {skipped[k] for k in ('replace_att', 'replace_rel', 'swap_obj', 'swap_att', 'add_att')} == {gen.NO_ELEMENT}
    with pytest.raises(CSClipError, match='replace_noun'): gen.HardNegatives(None, Fake(), gen.FirstRank(), ('replace_noun',))
    with pytest.raises(CSClipError, match='tolerance is -1; expected 0 to 1'): gen.HardNegatives(None, Fake(), gen.FirstRank(), tolerance=-1)

@pytest.mark.parametrize('relation,expected', [
    ('to the left of', {('to the left of', 'preposition'), ('left', 'opposite')}),
    ('riding', {('riding', 'verb'), ('riding', 'preposition')}), ('on top of', {('on top of', 'preposition')}),
    ('next to', {('next to', 'preposition')}),
    ('standing next to', {('standing', 'verb'), ('next to', 'preposition'), ('standing next to', 'preposition')}),
    ('held by', {('held', 'verb'), ('held by', 'preposition')}), ('close to', {('close to', 'preposition')})])
def test_relations_are_masked_whole_and_by_their_content_words(relation, expected):
    g = graph(f'a man {relation} a horse', ['a man', 'a horse'], [], [(relation, 0, 1)])
    holes = gen.slots(g, 'replace_rel', random.Random(0))
    assert {(g.caption[s.start:s.end], s.categories[0]) for s in holes} == expected

def test_no_swap_that_is_true_again():
    assert gen.swaps(PAIR, 'swap_obj') == []
    assert gen.swaps(graph('a dog next to a cat', ['a dog', 'a cat'], [], [('next to', 0, 1)]), 'swap_obj') == []
    assert len(gen.swaps(graph('a red dog next to a cat', ['a red dog', 'a cat'], [('red', 0)], [('next to', 0, 1)]), 'swap_obj')) == 1
    assert gen.swaps(graph('a small red dog', ['a small red dog'], [('small', 0), ('red', 0)]), 'swap_att') == []
    assert gen.swaps(graph('a red dog and a red cat', ['a red dog', 'a red cat'], [('red', 0), ('red', 1)]), 'swap_att') == []

def test_an_added_object_does_not_break_the_verbs_agreement():
    assert gen.slots(graph('The dog is here', ['The dog']), 'add_obj', random.Random(0)) == []
    assert gen.slots(graph('A dog that rides', ['A dog']), 'add_obj', random.Random(0)) == []

@pytest.mark.parametrize('caption, alone', [
    ('the man with glasses talks on a phone', 'man'), ('a man in a red jacket is riding a horse', 'man'), ("a man's hat on a table", 'man'),
    ('the door in the wall is pink', 'door'), ('the dog that sleeps on a mat', 'dog'), ('the dog was on a mat', 'dog')])
def test_nothing_is_added_to_what_a_verb_agrees_with_however_far_away(caption, alone):
    graph = next(iter(PARSER.parse([caption])))
    taken = {s.start for seed in range(30) for s in gen.slots(graph, 'add_obj', random.Random(seed))}
    ends = {o.text: o.end for o in graph.objects}
    assert ends[alone] not in taken

@pytest.mark.parametrize('caption, denied', [
    ('No people on the street with two cars', 'people'), ('A dog without a red leash on a mat', 'leash'), ('a bus that is not red near a green car', 'red')])
def test_what_a_caption_denies_is_not_edited(caption, denied):
    graph, place = next(iter(PARSER.parse([caption]))), caption.index(denied)
    for kind in gen.KINDS:
        if kind.startswith('swap'): spans = [s for pair in gen.swaps(graph, kind) for s in pair]
        else: spans = [s for seed in range(20) for s in gen.slots(graph, kind, random.Random(seed))]
        assert not any(s.start <= place < s.end or s.end == place + len(denied) for s in spans), kind

@pytest.mark.parametrize('caption, kind, lead', [('several sheep in a field', 'add_obj', ' and '), ('the people on a bench', 'add_obj', ' and '),
                                                 ('the sheep and the fish', 'add_obj', ' and a ')])
def test_number_is_the_determiners_where_the_word_does_not_tell(caption, kind, lead):
    graph = next(iter(PARSER.parse([caption])))
    assert gen._add_object_slot(graph, graph.objects[0]).lead == lead
    slot, words = gen.object_slot(graph, graph.objects[0]), gen._Words(['dog', 'dogs', 'zebras', 'zebra'])
    assert [words.words[i][-1] == 's' for i in words.fitting(slot)] == [lead == ' and ']*2

def test_owning_is_a_verb():
    graph = next(iter(PARSER.parse(['The kitchen has a silver refrigerator'])))
    assert [(s.categories, s.like) for s in gen.slots(graph, 'replace_rel', random.Random(0))] == [(('verb',), 'has')]

def test_attribute_classes():
    assert [gen.attribute_class(w) for w in ('red', 'dark blue', 'tiny', 'two', '3', 'wooden', '')] == \
        ['colour', 'colour', 'size', 'number', 'number', 'other', 'other']
    assert {gen.attribute_class(w) for w in COLOURS} == {'colour'}

@pytest.mark.parametrize('caption, word, new, expected', [
    ('A RED CAR', 'RED', 'orange', 'AN ORANGE CAR'), ('A red car', 'red', 'orange', 'An orange car'), ('Dogs run', 'Dogs', 'cats', 'Cats run'),
    ('Near a Car', 'Car', 'dog', 'Near a Dog'), ('a dog near a TV', 'TV', 'apple', 'a dog near an apple'), ('TV on a wall', 'TV', 'cat', 'Cat on a wall'),
    ('a dog. Dogs run', 'Dogs', 'cats', 'a dog. Cats run'), ('a man hugs Anna', 'Anna', 'table', 'a man hugs table')])
def test_a_new_word_takes_the_capitals_of_its_place_and_not_those_of_the_old_one(caption, word, new, expected):
    start = caption.index(word)
    start, end, text = gen.Slot(caption, start, start + len(word), ('noun',), word).edit(new)
    assert caption[:start] + text + caption[end:] == expected

@pytest.mark.parametrize('caption, a, b, expected', [
    ('Dogs chase cats.', 'Dogs', 'cats', 'Cats chase dogs.'), ('Anna hugs Bert.', 'Anna', 'Bert', 'Bert hugs Anna.'),
    ('TV beside a dog', 'TV', 'dog', 'Dog beside a TV'), ('Anna hugs an orange cat', 'Anna', 'cat', 'Cat hugs an orange Anna'),
    ('A dog runs. Cats sleep.', 'dog', 'Cats', 'A cats runs. Dog sleep.'),
    ('Black-haired girl and a tabby cat', 'Black-haired', 'tabby', 'Tabby girl and a black-haired cat'),
    ('AN ORANGE CAR UNDER A BLUE BUS', 'ORANGE', 'BLUE', 'A BLUE CAR UNDER AN ORANGE BUS'), ('dogs chase Anna', 'dogs', 'Anna', 'Anna chase dogs')])
def test_exchanged_words_keep_the_capitals_that_are_their_own(caption, a, b, expected):
    assert gen.exchange(caption, *(Span(w, caption.index(w), caption.index(w) + len(w)) for w in (a, b))) == expected

@pytest.mark.parametrize('case', [str.upper, str.lower])
def test_every_negative_is_in_the_case_of_its_caption(case):
    for caption in ('An orange car to the left of a blue umbrella', 'a red dog', 'two cats and a man riding a horse'):
        for seed in range(5):
            g = next(PARSER.parse([case(caption)]))
            found, _ = made(g, FAKE, seed=seed)
            texts = [n.text for n in found.values()] + [t for t in [gen.shuffled_caption(g, random.Random(seed))] if t]
            assert texts and all(t == case(t) for t in texts)
    assert made(graph('A RED DOG', ['A RED DOG']), FAKE)[0]['add_obj'].text == 'A RED DOG AND AN APPLE'

def test_shuffled_caption():
    assert gen.shuffled_caption(PAIR, random.Random(0)) == 'a cat and a dog'
    alone = graph('two small red dogs', ['two small red dogs'], [('two', 0), ('small', 0), ('red', 0)])
    assert gen.shuffled_caption(alone, random.Random(0)) is None

@settings(deadline=None, max_examples=150)
@given(st.text('ab nАé😀.A', max_size=12), st.text('ab nАé😀.A', max_size=12))
def test_edited_span_rebuilds_the_text(a, b):
    start, end, new = gen.edited_span(a, b)
    assert 0 <= start <= end <= len(a) and a[:start] + new + a[end:] == b

@pytest.fixture(scope='module', params=['bert_mlm', 'roberta_mlm'])
def mlm(request): return request.getfixturevalue(request.param)

def everything(engine, graphs): return list(engine.from_graphs(graphs))

def test_any_masked_model_proposes_whole_words_of_the_category(mlm):
    propose = gen.MLMPropose(mlm, k=99)
    nouns, colours, verbs = propose([gen.Slot('a dog on a table', 2, 5, ('noun',), 'dog'),
        gen.Slot('a red dog', 2, 5, ('adjective',), 'red', attribute='colour'),
        gen.Slot('a man riding a horse', 6, 12, ('verb',), 'riding')])
    words = {c.word for c in nouns} # byte-level BPE has more: 'hold', on the way to 'holding', is a word as well
    assert words >= {'cat', 'horse', 'man', 'apple', 'umbrella', 'table'}
    assert not words & {'dog', 'dogs', 'cats', 'tables', 'red', 'the', 'x', 's', 'ing'}
    assert {c.word for c in colours} == {'blue', 'green', 'orange'} and {c.word for c in verbs} == {'holding', 'carrying'}
    assert [c.rank for c in nouns] == list(range(len(nouns)))
    assert all(a.probability >= b.probability for a, b in zip(nouns, nouns[1:]))
    assert len(gen.MLMPropose(mlm, k=2)([gen.Slot('a dog', 2, 5, ('noun',), 'dog')])[0]) == 2

def test_captions_that_the_model_cannot_read_give_no_candidate(bert_mlm):
    propose = gen.MLMPropose(bert_mlm)
    far = 'a dog and ' * 5000 + 'a cat'
    assert propose([gen.Slot(far, len(far) - 3, len(far), ('noun',), 'cat'), gen.Slot('a [MASK] cat', 9, 12, ('noun',), 'cat')]) == [[], []]
    odd = ['', '   ', '猫と犬 🐈', 'a [MASK] dog']
    found = everything(gen.HardNegatives(None, propose, gen.FirstRank()), [graph(c) for c in odd])
    assert found == [([], dict.fromkeys(gen.KINDS, gen.NO_ELEMENT))]*4

def test_batches_do_not_matter(mlm, nli):
    graphs = GRAPHS * 3 + [graph(f'a {c} {n} on the {m}', [f'a {c} {n}', f'the {m}'], [(c, 0)], [('on', 0, 1)])
                           for c in ('red', 'big') for n in ('dog', 'apple') for m in ('table', 'horse')]
    with_batches = lambda n, chunk: gen.HardNegatives(None, gen.MLMPropose(mlm, batch_size=n), gen.NLIRank(nli, batch_size=n), chunk=chunk)
    together = everything(with_batches(512, 512), graphs)
    assert everything(with_batches(1, 3), graphs) == everything(with_batches(40, 1), graphs) == together
    assert everything(with_batches(512, 512), graphs[::-1]) == together[::-1]
    assert with_batches(1, 3).digest == with_batches(40, 1).digest

def relabelled(nli, folder, order):
    "The same classifier with its labels in another order."
    from safetensors.torch import load_file, save_file
    shutil.copytree(nli, folder)
    weights = load_file(folder/'model.safetensors')
    for name in ('classifier.weight', 'classifier.bias'): weights[name] = weights[name][order].contiguous()
    save_file(weights, folder/'model.safetensors', metadata={'format': 'pt'})
    config = json.loads((folder/'config.json').read_text())
    old = config['id2label']
    config['id2label'] = {str(n): old[str(o)].upper() for n, o in enumerate(order)}
    config['label2id'] = {v: int(k) for k, v in config['id2label'].items()}
    (folder/'config.json').write_text(json.dumps(config))
    return folder

def test_labels_are_read_by_name(bert_mlm, nli, tmp_path):
    propose, other = gen.MLMPropose(bert_mlm), relabelled(nli, tmp_path/'other', [2, 0, 1])
    choose = lambda folder: everything(gen.HardNegatives(None, propose, gen.NLIRank(folder)), GRAPHS)
    assert choose(other) == choose(nli)

def test_unusable_models_are_named(bert_mlm, nli, tmp_path):
    config = json.loads((shutil.copytree(nli, tmp_path/'bad')/'config.json').read_text())
    (tmp_path/'bad/config.json').write_text(json.dumps({**config, 'id2label': {'0': 'LABEL_0', '1': 'LABEL_1', '2': 'LABEL_2'}}))
    with pytest.raises(CSClipError, match='bad.*contradiction'): gen.NLIRank(tmp_path/'bad')
    with pytest.raises(CSClipError, match='weights lack'): gen.MLMPropose(nli)
    with pytest.raises(CSClipError, match='empty'): gen.MLMPropose((tmp_path/'empty').mkdir() or tmp_path/'empty')
    for device in ('gpu', 'cuda:99'):
        for load, name in ((gen.MLMPropose, bert_mlm), (gen.NLIRank, nli)):
            with pytest.raises(CSClipError, match=f'cannot go to device "{device}" .*expected "cpu"'): load(name, device=device)
    (shutil.copytree(bert_mlm, tmp_path/'cut')/'model.safetensors').write_bytes(b'no')
    with pytest.raises(CSClipError, match='cut'): gen.MLMPropose(tmp_path/'cut')

class Scores:
    "Gives each word its own P(contradiction)."
    digest = 'scores'
    def __init__(self, **words): self.words = words
    def __call__(self, pairs): return [verdict(max(self.words.get(w, 0.) for w in text.split())) for _, text in pairs]

@pytest.mark.parametrize('tolerance, kept', [(0., {'apple'}), (.02, {'apple', 'horse'}), (1., {'apple', 'horse', 'table'})])
def test_the_most_contradictory_wins_and_chance_decides_between_equals(tolerance, kept):
    fake, scores = Fake(noun=['table', 'horse', 'apple']), Scores(apple=.95, horse=.94, table=.9)
    chosen = lambda seed: made(PAIR, fake, scores, kinds=('replace_obj',), seed=seed, tolerance=tolerance)[0]['replace_obj']
    assert {chosen(seed).replacement.split()[-1] for seed in range(60)} == kept
    assert chosen(7) == chosen(7)

def test_without_a_ranking_the_likeliest_is_kept():
    assert {made(PAIR, Fake(noun=['table', 'horse']), seed=seed)[0]['replace_obj'].mlm_rank for seed in range(9)} == {0}

def test_random_proposals_keep_to_the_category_and_the_seed():
    propose = gen.RandomPropose(PARSER.parse(['two red dogs', 'a blue cat on a table']), seed=1)
    slot = gen.Slot('a horse', 2, 7, ('noun',), 'horse')
    assert propose([slot]) == propose([slot]) and {c.word for c in propose([slot])[0]} <= {'cat', 'table'}
    assert gen.RandomPropose(PARSER.parse(['two red dogs']))([slot]) == [[]]

@pytest.fixture
def parsed(tmp_path):
    "Three shards of scene graphs."
    for k in range(3):
        rows = [{'sentid': 10*k + n, 'image': f'train/{n}.png', **g.to_row()} for n, g in enumerate(GRAPHS)]
        write_shard(tmp_path/f'graphs/part-{k:05d}.parquet', rows, SCHEMA, f'graphs {k}')
    return tmp_path/'graphs'

def engine(rank=gen.FirstRank(), **kw): return gen.HardNegatives(None, FAKE, rank, **kw)

def state(folder): return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}

def test_shards_go_on_where_they_stopped(parsed, tmp_path):
    out = tmp_path/'out'
    coverage = gen.generate_file(parsed, out, engine())
    assert coverage['captions'] == 15 and json.loads((out/'coverage.json').read_text()) == coverage
    for kind in gen.KINDS: assert sum(coverage[kind].values()) == 15
    rows = pq.read_table(out/'part-00001.parquet').to_pylist()
    assert [r['sentid'] for r in rows] == [10, 11, 12, 13, 14] and rows[0]['caption'] == CAR.caption
    before = state(out)
    (out/'part-00000.parquet').unlink()
    (out/'part-00001.parquet').write_bytes(before['part-00001.parquet'][0][:100])
    assert gen.generate_file(parsed, out, engine()) == coverage
    after = state(out)
    assert {k: v[0] for k, v in after.items()} == {k: v[0] for k, v in before.items()}
    assert after['part-00002.parquet'] == before['part-00002.parquet'] and after['part-00001.parquet'] != before['part-00001.parquet']

@pytest.mark.parametrize('change', [dict(seed=1), dict(kinds=gen.KINDS[:3]), dict(rank=Likes('apple')), dict(tolerance=.1),
                                    dict(min_contradiction=.1), dict(anywhere=True)])
def test_other_parameters_never_reuse_a_shard(parsed, tmp_path, change):
    gen.generate_file(parsed, tmp_path/'out', engine())
    gen.generate_file(parsed, tmp_path/'out', engine(**change))
    gen.generate_file(parsed, tmp_path/'fresh', engine(**change))
    assert {k: v[0] for k, v in state(tmp_path/'out').items()} == {k: v[0] for k, v in state(tmp_path/'fresh').items()}

def test_a_run_broken_off_with_new_parameters_is_not_read(parsed, tmp_path):
    gen.generate_file(parsed, tmp_path, engine())
    whole = (parsed/'part-00001.parquet').read_bytes()
    (parsed/'part-00001.parquet').write_bytes(b'torn')
    with pytest.raises(CSClipError): gen.generate_file(parsed, tmp_path, engine(seed=1))
    with pytest.raises(CSClipError, match='the generate stage was broken off'): load_supervision(tmp_path)
    (parsed/'part-00001.parquet').write_bytes(whole)
    gen.generate_file(parsed, tmp_path, engine(seed=1))
    assert len(load_supervision(tmp_path)) == 5

def test_shards_of_other_graphs_do_not_stay(parsed, tmp_path):
    gen.generate_file(parsed, tmp_path/'out', engine())
    (parsed/'part-00002.parquet').unlink()
    assert gen.generate_file(parsed, tmp_path/'out', engine())['captions'] == 10
    assert not (tmp_path/'out/part-00002.parquet').exists()
    with pytest.raises(CSClipError, match='run the parse stage'): gen.generate_file(tmp_path/'none', tmp_path/'out', engine())

@pytest.mark.parametrize('harm, said', [
    (lambda path: path.write_bytes(path.read_bytes()[:-9]), 'no readable Parquet file'), (lambda path: path.write_bytes(b''), 'no readable Parquet file'),
    (lambda path: write_shard(path, [{'x': 1}], pa.schema({'x': pa.int64()}), 'foreign'), 'no column sentid, image, caption'),
    (lambda path: write_shard(path, [{'sentid': 77, 'image': '7.png', **CAR.to_row(), 'caption': 'a cat'}], SCHEMA, 'other'), 'sentid 77')])
def test_broken_and_foreign_graphs_are_named(parsed, tmp_path, harm, said):
    harm(parsed/'part-00001.parquet')
    with pytest.raises(CSClipError, match=f'part-00001.parquet: {said}'): gen.generate_file(parsed, tmp_path/'out', engine())
    assert {p.name for p in (tmp_path/'out').iterdir()} == {'part-00000.parquet', UNFINISHED}

@pytest.fixture
def variant(bert_mlm, nli):
    def build(name, **kw): return gen.hard_negatives(bert_mlm, nli, name, PARSER.parse(['two big dogs near an apple', 'a green cat holding a table']), **kw)
    return build

def test_variants_are_those_of_the_paper(variant, bert_mlm):
    graphs = list(PARSER.parse(['An orange car to the left of a blue umbrella.', 'a man is riding a horse']))
    found = {name: [n for negatives, _ in everything(variant(name), graphs) for n in negatives] for name in gen.VARIANTS}
    asked = lambda name: [n for n in found[name] if not n.kind.startswith('swap')]
    assert all(n.mlm_rank is not None and n.contradiction is not None for n in asked('mlm_nli'))
    assert all(n.mlm_rank == 0 and n.contradiction is None for n in asked('mlm'))
    assert all(n.mlm_rank is None and n.mlm_probability is None for n in asked('random'))
    assert {n.replacement.split()[-1] for n in asked('random') if n.kind == 'replace_obj'} <= {'dog', 'apple', 'cat', 'table'}
    with pytest.raises(CSClipError, match="variant is 'best'; expected one of mlm_nli, mlm, random, random_position"): variant('best')

def test_random_places_take_the_same_words_and_only_the_place_differs(variant):
    graphs = GRAPHS + list(PARSER.parse(['a big dog and a small cat under two green umbrellas', 'The orange cat on a table']))
    for seed in range(4):
        pairs = zip(everything(variant('mlm_nli', seed=seed), graphs), everything(variant('random_position', seed=seed), graphs))
        for (placed, _), (anywhere, skipped) in pairs:
            kept = {n.kind: n for n in placed}
            assert {n.kind for n in anywhere} | {k for k, why in skipped.items() if why == gen.NO_PLACE} == set(kept)
            for n in anywhere:
                assert n.caption[:n.start] + n.replacement + n.caption[n.end:] == n.text not in (n.caption, kept[n.kind].text)
                if not n.kind.startswith('swap'): assert n.replacement.split()[-1].lower() == kept[n.kind].replacement.split()[-1].lower()

def test_what_does_not_contradict_enough_is_counted():
    scores = Scores(apple=.4)
    assert made(PAIR, Fake(noun=['apple']), scores, min_contradiction=.5)[1]['replace_obj'] == gen.NOT_CONTRADICTORY
    assert 'replace_obj' in made(PAIR, Fake(noun=['apple']), scores, min_contradiction=.4)[0]

@pytest.mark.parametrize('name', gen.VARIANTS[:3])
def test_what_is_explained_is_what_is_made(variant, name):
    engine = variant(name, parser=PARSER, min_contradiction=.3)
    for caption in ('An orange dog to the left of two blue cats.', 'a man riding a horse', 'a dog', 'it rains'):
        made, considered = {n.kind: n for n in engine.generate([caption])}, list(engine.explain(caption))
        kept = {c.kind: c for c in considered if c.outcome == gen.KEPT}
        assert set(kept) == set(made) and {c.kind for c in considered} == set(gen.KINDS)
        for kind, c in kept.items():
            if kind.startswith('swap'): assert c.place == made[kind].text
            else: assert made[kind].replacement.split()[-1].lower() == c.word and (c.verdict is None or c.verdict.contradiction == made[kind].contradiction)
        if name != 'random': assert any(c.outcome.startswith('no ') for c in considered if c.word) or caption == 'it rains'

def test_weights_stored_in_half_precision_compute_in_full(bert_mlm, nli, tmp_path):
    from safetensors.torch import load_file, save_file
    for name, folder in ('mlm', bert_mlm), ('nli', nli):
        weights = load_file(shutil.copytree(folder, tmp_path/name)/'model.safetensors')
        save_file({k: v.half() for k, v in weights.items()}, tmp_path/name/'model.safetensors', metadata={'format': 'pt'})
        config = json.loads((tmp_path/name/'config.json').read_text())
        (tmp_path/name/'config.json').write_text(json.dumps({**config, 'dtype': 'float16'}))
    assert gen.MLMPropose(tmp_path/'mlm').model.dtype == gen.NLIRank(tmp_path/'nli').model.dtype == torch.float32
    half = gen.NLIRank(nli, precision='bf16')
    assert half.model.dtype == torch.bfloat16 and half.digest != gen.NLIRank(nli).digest
    with pytest.raises(CSClipError, match="precision is 'int8'; expected fp32 or bf16"): gen.NLIRank(nli, precision='int8')

def test_a_classifier_of_two_labels_and_a_tokenizer_without_a_mask_are_refused(bert_mlm, tmp_path):
    labels = {0: 'entailment', 1: 'contradiction'}
    bert(BertForSequenceClassification, tmp_path/'two', id2label=labels, label2id={v: k for k, v in labels.items()})
    with pytest.raises(CSClipError, match='two: its labels are entailment, contradiction; expected entailment, neutral and contradiction'):
        gen.NLIRank(tmp_path/'two')
    shutil.copytree(bert_mlm, tmp_path/'open')
    for name in 'tokenizer_config.json', 'special_tokens_map.json':
        if (path := tmp_path/'open'/name).exists():
            path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != 'mask_token'} | {'mask_token': None}))
    with pytest.raises(CSClipError, match='open: its tokenizer has no mask token'): gen.MLMPropose(tmp_path/'open')

def test_rows_say_what_made_them(parsed, tmp_path):
    gen.generate_file(parsed, tmp_path/'out', engine(Likes('apple')))
    row = pq.read_table(tmp_path/'out/part-00000.parquet').to_pylist()[0]
    assert (row['propose'], row['rank']) == ('fake', 'likes')
    for n in row['negatives']:
        asked = not n['kind'].startswith('swap')
        assert (n['contradiction'] is not None) == (n['neutral'] is not None) == (n['entailment'] is not None) == asked

@torch.inference_mode()
def test_the_last_layer_alone_gives_what_the_whole_model_gives(mlm, nli):
    from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer
    text, pairs = 'a dog on a {}', [('a red dog', 'a blue dog'), ('a man riding a horse', 'a man holding a horse and a cat')]
    tokenizer, whole = AutoTokenizer.from_pretrained(mlm), AutoModelForMaskedLM.from_pretrained(mlm).eval()
    batch = tokenizer(text.format(tokenizer.mask_token), return_tensors='pt')
    expected = whole(**batch).logits[0, batch.input_ids[0] == tokenizer.mask_token_id][0].log_softmax(-1)
    propose, rank = gen.MLMPropose(mlm), gen.NLIRank(nli)
    assert torch.allclose(propose._log_probabilities([text.format(tokenizer.mask_token)])[0], expected, atol=1e-5)
    tokenizer, whole = AutoTokenizer.from_pretrained(nli), AutoModelForSequenceClassification.from_pretrained(nli).eval()
    for pair, verdict in zip(pairs, rank(pairs)):
        assert verdict == pytest.approx(whole(**tokenizer(*pair, return_tensors='pt')).logits[0].softmax(-1).tolist(), abs=1e-4)
    for model in propose.model, rank.model: assert not any('forward' in vars(m) for m in model.modules()), 'the shortcut does not outlast the call'

@torch.inference_mode()
def test_other_architectures_compute_every_token(tmp_path):
    from transformers import RobertaPreLayerNormConfig, RobertaPreLayerNormForMaskedLM
    tokenizer, sizes = wordpiece(), dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    torch.manual_seed(0)
    model = RobertaPreLayerNormForMaskedLM(RobertaPreLayerNormConfig(vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=0, **sizes))
    for part in model, tokenizer: part.save_pretrained(tmp_path)
    batch = tokenizer('a [MASK] on a table', return_tensors='pt')
    expected = model.eval()(input_ids=batch.input_ids).logits[0, 2].log_softmax(-1)
    assert torch.allclose(gen.MLMPropose(tmp_path)._log_probabilities(['a [MASK] on a table'])[0], expected, atol=1e-5)

def test_an_unlikely_word_is_not_a_random_one():
    relation = graph('a man standing next to a horse', ['a man', 'a horse'], [], [('standing next to', 0, 1)])
    class Two(Fake):
        def __call__(self, slots): return [[gen.Candidate('above', 0, .5 if s.categories == ('preposition',) and s.like == 'next to' else 0.)] for s in slots]
    assert {made(relation, Two(), kinds=('replace_rel',), seed=seed)[0]['replace_rel'].text for seed in range(20)} == {'a man standing above a horse'}

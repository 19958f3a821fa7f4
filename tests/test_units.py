"Units: arguments to the letter, one edit a foil, nothing that the caption says, no dependence on company; half-truths that are false."
import json
import random
import re
import shutil

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from test_generation import CAR, GRAPHS, PARSER, RIDER, Fake, Likes, graph, verdict

from cs_clip import generation as gen, icon_world as iw, units as un
from cs_clip.data import Record, Records, Unit, UnitFoil, load_supervision
from cs_clip.files import CSClipError
from cs_clip.lexicon import same_meaning
from cs_clip.parsing import Relation, SceneGraph, Span, parse_file

FAKE = Fake(noun=['apple', 'car'], adjective=['green', 'orange'], preposition=['under', 'beside'], verb=['holding'], numeral=['three'], opposite=['right'])

def units(g, propose=FAKE, rank=gen.FirstRank(), limit=12, predicates=None, **kw):
    return next(un.UnitFoils(gen.HardNegatives(None, propose, rank, **kw), limit, predicates).from_graphs([g]))

def texts(found): return [u.text for u in found]

def parsed(caption): return next(iter(PARSER.parse([caption])))

def foils(found, change): return {u.text: f.text for u in found.entities + found.relations for f in u.foils if f.change == change}


# ---- units
@pytest.mark.parametrize('caption, entities, relations', [
    ('A brown horse standing near a barn with three dogs.', ['brown horse', 'barn', 'three dogs'],
     ['brown horse standing near barn', 'brown horse standing with three dogs']),
    ('a bike ridden by a man in a blue shirt', ['bike', 'man', 'blue shirt'], ['bike ridden by man', 'man in blue shirt']),
    ('a picture of a group of people sitting on his bench', ['group of people', 'bench'], ['group of people sitting on bench']),
    ('Above a cat is an old dog', ['cat', 'old dog'], ['old dog above cat']),
    ('A man that is holding these umbrellas up', ['man', 'umbrellas'], ['man holding up umbrellas']),
    ('TWO DOGS UNDER A TREE', ['two dogs', 'tree'], ['two dogs under tree']),
    ('A dog next to a dog', ['dog'], []),
    ('A car in an area', ['car'], []),
    ('wow', [], [])])
def test_units_of_a_caption(caption, entities, relations):
    found = units(parsed(caption))
    assert texts(found.entities) == entities and texts(found.relations) == relations


def test_why_units_are_missing():
    skipped = units(parsed('A dog next to a dog in an area')).skipped
    assert skipped['entities', un.REPEATED] == 1 and skipped['entities', un.GENERIC_NOUN] == 1 and skipped['relations', un.NO_ARGUMENT] >= 1


def test_at_most_twelve_of_each():
    things = [f'a {w}' for w in 'dog cat horse man table car tree cloud star leaf boat bus book bell'.split()]
    g = graph(' on '.join(things), things, [], [])
    spans = [Span('on', m.start(), m.end()) for m in re.finditer('on', g.caption) if g.caption[m.start()-1] == ' ']
    g = SceneGraph(g.caption, g.objects, (), tuple(Relation((s,), k, k + 1) for k, s in enumerate(spans)))
    found = units(g)
    assert len(found.entities) == 12 and len(found.relations) == 11 and found.skipped['entities', un.TOO_MANY] == 2
    assert texts(units(g, limit=3).entities) == ['dog', 'cat', 'horse']


def world_captions(n): return [c for i in range(n) for c, _ in iw.captions_at(0, 'train', i)]

@pytest.fixture(scope='module')
def many():
    "Units of many captions of the world, with the words of the world proposed at random and ranked at random."
    captions = world_captions(60)
    graphs = list(PARSER.parse(captions))
    class Chance:
        digest = 'chance'
        def __call__(self, pairs): return [verdict(random.Random(t).random()) for _, t in pairs]
    class Words(gen.RandomPropose):
        def __call__(self, slots): return [self.some(s) for s in slots]
        def some(self, slot):
            words = self.words[gen._ELEMENT[slot.categories[0]]]
            good = [words.words[i] for i in words.fitting(slot) if not gen._means_alike(words.words[i], slot)]
            return [gen.Candidate(w) for w in random.Random(slot.masked('_')).sample(good, min(6, len(good)))]
    return [(g, u) for g, u in zip(graphs, un.UnitFoils(gen.HardNegatives(None, Words(graphs), Chance())).from_graphs(graphs))]


def test_entities_stand_in_the_caption_and_relations_are_made_of_them(many):
    assert sum(len(u.relations) for _, u in many) > 80
    for g, u in many:
        for e in u.entities:
            assert g.caption[e.start:e.end].lower() == e.text.lower() and g.objects[e.object].text in g.caption[e.start:e.end]
            assert not un._DETERMINER.match(e.text)
        for r in u.relations:
            assert r.text == f'{u.entities[r.subject].text} {r.predicate} {u.entities[r.object].text}' and r.subject != r.object
        assert len(set(texts(u.entities))) == len(u.entities) and len(set(texts(u.relations))) == len(u.relations)


def test_foils_are_one_edit_of_their_kind(many):
    changes = {}
    for g, u in many:
        for e in u.entities:
            others = [o.text for o in u.entities if o is not e]
            for f in e.foils:
                changes[f.change] = changes.get(f.change, 0) + 1
                assert f.change in un.CHANGES['entity'] and un.entity_fault(e.text, f.text, others) is None
                head = g.objects[e.object].text
                assert (f.text.split()[-1] == head) == (f.change == 'attribute')
        for r in u.relations:
            s, o, said = u.entities[r.subject].text, u.entities[r.object].text, texts(u.relations)
            for f in r.foils:
                changes[f.change] = changes.get(f.change, 0) + 1
                assert f.text not in said and f.text != r.text
                if f.change == 'swap': assert f.text == f'{o} {r.predicate} {s}' and not un._symmetric(r.predicate)
                if f.change == 'predicate':
                    new = f.text.removeprefix(f'{s} ').removesuffix(f' {o}')
                    assert f.text == f'{s} {new} {o}' and not same_meaning(new, r.predicate)
                if f.change == 'entity':
                    start, end = f.text.split(f' {r.predicate} ')
                    assert (start == s) != (end == o)
    assert set(changes) == {c for cs in un.CHANGES.values() for c in cs} and min(changes.values()) > 30


def test_sentences_are_the_caption_with_the_same_edit(many):
    for g, u in many:
        for unit in u.entities + u.relations:
            for f in unit.foils:
                assert f.sentence != g.caption and f.sentence[:1].isupper() == g.caption[:1].isupper()
                if f.change == 'swap':
                    plain = lambda t: sorted(w for w in re.findall(r'\w+', t.lower()) if w not in ('a', 'an'))
                    assert plain(f.sentence) == plain(g.caption)
                else: # what is new in the foil is new in the sentence
                    assert set(f.text.split()) - set(unit.text.split()) <= set(re.findall(r"[\w'-]+", f.sentence.lower()))


def test_what_the_caption_names_is_no_foil():
    found = units(graph('a car and a green apple', ['a car', 'a green apple'], [('green', 1)]))
    assert foils(found, 'object') == {} # 'apple' and 'car' are both there
    assert foils(found, 'attribute') == {'green apple': 'orange apple'}
    twins = graph('a green car and an orange car', ['a green car', 'an orange car'], [('green', 0), ('orange', 1)])
    assert foils(units(twins), 'attribute') == {}
    bare = graph('a red car and a car', ['a red car', 'a car'], [('red', 0)])
    assert foils(units(bare), 'attribute') == {} # the other car may be green
    assert units(bare).skipped['attribute', gen.NO_ELEMENT] == 2


def test_symmetric_predicates_are_never_swapped():
    for p in 'next to', 'near', 'with', 'standing beside', 'stands by', 'sits next to':
        g = graph(f'a man {p} a horse', ['a man', 'a horse'], [], [(p, 0, 1)])
        assert 'swap' not in {f.change for r in units(g).relations for f in r.foils} and units(g).skipped['swap', un.SYMMETRIC] == 1
    assert foils(units(RIDER), 'swap') == {'man riding horse': 'horse riding man'}
    assert foils(units(CAR), 'swap') == {'orange car to the left of blue umbrella': 'blue umbrella to the left of orange car'}


def test_verbs_agree_after_a_swap():
    chase = graph('two dogs chase a cat', ['two dogs', 'a cat'], [('two', 0)], [('chase', 0, 1)])
    assert units(chase).skipped['swap', un.AGREEMENT] == 1
    assert foils(units(parsed('two dogs chasing a cat')), 'swap') == {'two dogs chasing cat': 'cat chasing two dogs'}


def test_a_passive_reads_as_it_stands():
    found = units(parsed('A bike ridden by a man.'), Fake(verb=['carried']))
    assert foils(found, 'predicate') == {'bike ridden by man': 'bike carried by man'}
    swap = next(f for f in found.relations[0].foils if f.change == 'swap')
    assert (swap.text, swap.sentence) == ('man ridden by bike', 'A man ridden by a bike.')


def test_a_swapped_sentence_takes_its_determiners_along():
    found = units(parsed('A group of people riding his two horses.'))
    swap = next(f for f in found.relations[0].foils if f.change == 'swap')
    assert swap.text == 'two horses riding group of people' and swap.sentence == 'His two horses riding a group of people.'


def test_the_most_contradictory_wins():
    for word in 'apple', 'tree', 'bell':
        found = units(RIDER, Fake(noun=['bell', 'tree', 'apple']), Likes(word))
        assert foils(found, 'object') == {'man': word, 'horse': word}
        assert all(f.contradiction == 1 and f.probability == .5 for e in found.entities for f in e.foils)
    nothing = units(RIDER, Fake(noun=['bell']), Likes('other'), min_contradiction=.5)
    assert foils(nothing, 'object') == {} and nothing.skipped['object', gen.NOT_CONTRADICTORY] == 2


def test_a_predicate_keeps_its_length_where_it_can():
    words = Fake(preposition=['above', 'under'], opposite=['right'], verb=['standing'])
    for rank in gen.FirstRank(), Likes('above'):
        assert foils(units(CAR, words, rank), 'predicate') == {'orange car to the left of blue umbrella': 'orange car to the right of blue umbrella'}
    assert foils(units(parsed('A man next to a horse'), words), 'predicate') == {'man next to horse': 'man above horse'}
    sitting = foils(units(parsed('A man sitting on a horse'), words, Likes('under')), 'predicate')
    assert sitting == {'man sitting on horse': 'man sitting under horse'}


def test_a_foils_predicate_is_one_that_captions_use():
    words, used = Fake(preposition=['above', 'under', 'behind']), un.used_predicates(map(parsed, ['A cat Under a dog', 'the dog is on a mat']))
    assert used == {'under', 'on'} == un.used_predicates(GRAPHS[:0] + [parsed(c) for c in ('a cat under a dog on a mat',)*2], 2)
    foil = lambda **kw: foils(units(parsed('A man next to a horse'), words, Likes('above'), **kw), 'predicate')
    assert foil() == {'man next to horse': 'man above horse'} and foil(predicates=used) == {'man next to horse': 'man under horse'}
    none = units(parsed('A man next to a horse'), words, predicates={'on'})
    assert foils(none, 'predicate') == {} and none.skipped['predicate', gen.NO_CANDIDATE] == 1
    makers = [un.UnitFoils(gen.HardNegatives(None, FAKE, gen.FirstRank()), predicates=p) for p in (None, {'on'}, used, set(used))]
    assert len({m.digest for m in makers}) == 3


def test_a_relations_entity_gives_way_to_its_own_foil():
    found = units(RIDER, Fake(noun=['apple']))
    own = {f.text for e in found.entities for f in e.foils}
    assert own == {'apple'} and foils(found, 'entity')['man riding horse'] in ('apple riding horse', 'man riding apple')
    assert units(RIDER, Fake()).skipped['entity', gen.NO_CANDIDATE] == 1


@pytest.mark.parametrize('unit, foil, change, why', [
    (('man', 'on', 'horse'), ('man', 'on', 'horse'), 'predicate', un.IDENTICAL),
    (('man', 'on', 'horse'), ('man', 'on top of', 'horse'), 'predicate', un.SYNONYM),
    (('man', 'riding', 'horse'), ('man', 'rides', 'horse'), 'predicate', un.SYNONYM),
    (('man', 'riding', 'horse'), ('woman', 'leading', 'horse'), 'predicate', un.EDITS),
    (('man', 'riding', 'horse'), ('woman', 'leading', 'horse'), 'entity', un.EDITS),
    (('man', 'riding', 'horse'), ('woman', 'riding', 'cow'), 'entity', un.EDITS),
    (('man', 'riding', 'horse'), ('men', 'riding', 'horse'), 'entity', un.SYNONYM),
    (('man', 'riding', 'horse'), ('horse', 'leading', 'man'), 'swap', un.EDITS),
    (('man', 'riding', 'horse'), ('horse', 'riding', 'horse'), 'entity', un.DUPLICATE),
    (('small dog', 'chasing', 'dogs'), ('dogs', 'chasing', 'small dog'), 'swap', None),
    (('man', 'near', 'horse'), ('horse', 'near', 'man'), 'swap', un.SYMMETRIC),
    (('man', 'riding', 'horse'), ('man', 'leading', 'horse'), 'predicate', None)])
def test_relation_faults(unit, foil, change, why): assert un.relation_fault(unit, foil, change) == why


def test_relation_foils_that_the_caption_says_are_none():
    assert un.relation_fault(('man', 'riding', 'horse'), ('man', 'leading', 'horse'), 'predicate', ['Man leading horse']) == un.DUPLICATE


# ---- company and disk
@pytest.mark.parametrize('chunk', [1, 2, 512])
def test_company_does_not_matter(bert_mlm, nli, chunk):
    engine = lambda chunk: gen.HardNegatives(None, gen.MLMPropose(bert_mlm), gen.NLIRank(nli), chunk=chunk, tolerance=.05)
    alone = [next(un.UnitFoils(engine(512)).from_graphs([g])) for g in GRAPHS]
    assert list(un.UnitFoils(engine(chunk)).from_graphs(iter(GRAPHS))) == alone
    assert list(un.UnitFoils(engine(chunk)).from_graphs(GRAPHS[::-1])) == alone[::-1]


def test_seeds_differ_and_repeat():
    propose = Fake(noun=['apple', 'bell', 'tree', 'cloud'], adjective=['green'])
    runs = [units(CAR, propose, Likes('none'), tolerance=1., seed=s) for s in range(6)]
    assert runs[0] == units(CAR, propose, Likes('none'), tolerance=1., seed=0) and len({str(r.entities) for r in runs}) > 1


@pytest.fixture
def parse(tmp_path):
    parse_file(((i, f'train/{i//2}.png', c) for i, c in enumerate(world_captions(6))), tmp_path/'parse', shard_size=7)
    return tmp_path/'parse'

def maker(**kw): return un.UnitFoils(gen.HardNegatives(None, FAKE, Likes('apple'), **kw))

def shards(folder): return {p.name: p.read_bytes() for p in folder.glob('*')}

def test_shards_go_on_where_they_stopped(parse, tmp_path, monkeypatch):
    coverage = un.units_file(parse, tmp_path/'a', maker())
    whole, made_of = shards(tmp_path/'a'), []
    n = len(whole) - 1
    assert n >= 3 and coverage['captions'] == len(world_captions(6)) and json.loads(whole['coverage.json']) == coverage
    monkeypatch.setattr(un, '_rows', lambda maker, source, real=un._rows: made_of.append(source.name) or real(maker, source))
    un.units_file(parse, tmp_path/'a', maker())
    assert made_of == [] and shards(tmp_path/'a') == whole
    (tmp_path/'a/part-00001.parquet').write_bytes(b'torn')
    (tmp_path/'a/part-00099.parquet').write_bytes(b'of another run')
    un.units_file(parse, tmp_path/'a', maker())
    assert made_of == ['part-00001.parquet'] and shards(tmp_path/'a') == whole
    un.units_file(parse, tmp_path/'a', maker(seed=1))
    assert len(made_of) == 1 + n


def test_coverage_counts_every_unit_and_reason(parse, tmp_path):
    coverage = un.units_file(parse, tmp_path/'a', maker())
    entities, relations = coverage['entities']['made'], coverage['relations']['made']
    assert entities > relations > 0
    for change in 'object', 'attribute': assert sum(coverage[change].values()) == entities
    for change in 'predicate', 'swap', 'entity': assert sum(coverage[change].values()) == relations


def test_units_join_the_negatives_by_sentid(parse, tmp_path):
    gen.generate_file(parse, tmp_path/'generate', gen.HardNegatives(None, FAKE, gen.FirstRank()))
    un.units_file(parse, tmp_path/'units', maker())
    plain, records = load_supervision(tmp_path/'generate'), load_supervision(tmp_path/'generate', tmp_path/'units')
    assert [(r.image, r.captions, r.negatives, r.shuffled) for r in plain] == [(r.image, r.captions, r.negatives, r.shuffled) for r in records]
    assert all(r.units == () for r in plain) and all(len(r.units) == len(r.captions) for r in records)
    kinds = [[u.kind for u in caption] for r in records for caption in r.units]
    assert all(k == sorted(k) for k in kinds) and any('relation' in k for k in kinds)
    for r in records:
        for caption in r.units:
            for u in caption:
                if u.kind == 'relation': assert u.text.startswith(caption[u.arguments[0]].text) and u.text.endswith(caption[u.arguments[1]].text)
    assert plain.digest != records.digest


def test_folders_of_other_captions_are_refused(parse, tmp_path):
    gen.generate_file(parse, tmp_path/'generate', gen.HardNegatives(None, FAKE, gen.FirstRank()))
    un.units_file(parse, tmp_path/'units', maker())
    (tmp_path/'units/part-00000.parquet').rename(tmp_path/'kept')
    with pytest.raises(CSClipError, match='sentid 0: expected units of'): load_supervision(tmp_path/'generate', tmp_path/'units')
    (tmp_path/'kept').rename(tmp_path/'units/part-00000.parquet')
    (tmp_path/'generate/part-00001.parquet').unlink()
    with pytest.raises(CSClipError, match='sentid 7: not in'): load_supervision(tmp_path/'generate', tmp_path/'units')
    with pytest.raises(CSClipError, match='run the units stage first'): load_supervision(tmp_path/'generate', tmp_path/'none')
    shutil.copy(tmp_path/'units/part-00000.parquet', tmp_path/'units/part-00001.parquet')
    with pytest.raises(CSClipError, match='comes twice'): load_supervision(tmp_path/'generate', tmp_path/'units')


# ---- half-truths from captions
def record(*captions, image='train/1.png'):
    return Record(image, tuple(c for c, _ in captions), tuple(range(len(captions))), ((),)*len(captions), (None,)*len(captions), tuple(u for _, u in captions))

CAT = Unit('entity', 'red cat', (UnitFoil('object', 'red mug', ''), UnitFoil('attribute', 'blue cat', '')))
DOG = Unit('entity', 'dog', (UnitFoil('object', 'tree', ''),))
ON = Unit('relation', 'red cat on dog', (UnitFoil('predicate', 'red cat under dog', ''), UnitFoil('swap', 'dog on red cat', ''),
                                         UnitFoil('entity', 'red mug on dog', '')), (0, 1))

def test_half_truths_of_a_caption():
    rows = {r.change: r for r in un.half_truths(Records([record(('A red cat on a dog', (CAT, DOG, ON)))]), 'here')}
    assert set(rows) == set(un.ADDED)
    assert rows['attribute'] == ('train/1.png', 'dog', 'dog and red cat', 'dog and blue cat', 'entity', 'attribute', 'here')
    assert rows['predicate'][1:4] == ('red cat', 'red cat on dog', 'red cat under dog')
    assert rows['swap'][1:4] == ('red cat', 'red cat on dog', 'dog on red cat')
    assert rows['object'].half_truth in ('dog and red mug', 'red cat and tree')


def test_half_truths_differ_in_length_never():
    far = ON._replace(foils=(UnitFoil('predicate', 'red cat to the left of dog', ''),))
    assert [r.change for r in un.half_truths([record(('A red cat on a dog', (CAT, DOG, far)))], 'here')] == ['object', 'attribute']


def test_what_another_caption_says_is_no_half_truth():
    other = Unit('entity', 'blue cat', ()), Unit('relation', 'red cat under dog', (), (0, 1))
    rows = un.half_truths([record(('A red cat on a dog', (CAT, DOG, ON)), ('mugs and trees', other))], 'here')
    assert [r.change for r in rows] == ['swap']


def test_one_unit_alone_gives_no_half_truth(): assert list(un.half_truths([record(('A red cat', (CAT,)))], 'here')) == []


def test_half_truths_to_disk_and_back(tmp_path):
    rows = list(un.half_truths([record(('A red cat on a dög', (CAT, DOG._replace(text='dög'), ON)))], 'here'))
    assert un.write_half_truths(rows, tmp_path/'rows.jsonl') == len(rows) and un.read_half_truths(tmp_path/'rows.jsonl') == rows


@pytest.mark.parametrize('spoil, why', [
    (lambda text: text[:-20], 'line 2: broken JSON'), (lambda text: '', 'no half-truths'), (lambda text: text.replace('"anchor"', '"start"', 1), 'line 1: no key "anchor"'),
    (lambda text: text.replace('"attribute"', '"swap"'), 'line 2: addition "entity" with change "swap"'), (lambda text: text.replace('"here"', '3', 1), 'line 1: "source" is 3'),
    (lambda text: text.replace('{', '[{', 1).replace('}', '}]', 1), 'line 1: no key "image"')])
def test_broken_half_truths_are_named(tmp_path, spoil, why):
    un.write_half_truths(list(un.half_truths([record(('A red cat on a dog', (CAT, DOG)))], 'here')), path := tmp_path/'rows.jsonl')
    path.write_text(spoil(path.read_text()))
    with pytest.raises(CSClipError, match=re.escape(why)): un.read_half_truths(path)
    with pytest.raises(CSClipError, match='cannot be read'): un.read_half_truths(tmp_path/'none.jsonl')


def test_scores_by_addition_and_change():
    rows = [un.HalfTruth('1.png', 'a', 'a and b', 'a and c', un.ADDED[c], c, 's') for c in ('object', 'attribute', 'swap', 'swap')]
    found = un.half_truth_scores(rows, [(.5, .6, .4), (.5, .4, .4), (.5, .6, .5), (.5, .7, .6)])
    assert found['all'] == {'accuracy': .5, 'correct_ordering': .25, 'n': 4} and found['swap'] == {'accuracy': 0, 'correct_ordering': 0, 'n': 2}
    assert found['entity'] == {'accuracy': 1, 'correct_ordering': .5, 'n': 2} and 'predicate' not in found
    assert un.half_truth_scores(rows, un.shortest_first(rows))['all']['correct_ordering'] == 0
    with pytest.raises(ValueError): un.half_truth_scores(rows, [(1, 2, 3)])


# ---- half-truths of the world
NOUNS = {w: n.name for n in iw.NOUNS for w in n.words} | {iw.plural(w if w != n.name else n.name): n.name for n in iw.NOUNS for w in n.words}
SAID = {w: value for value, words in iw.ADJECTIVES.items() for w in words}
RELATION = {w: r for r, words in iw.RELATIONS.items() for w in words}

def reading(text):
    "The statement that a text makes, read from its words alone."
    relation = next((w for w in sorted(RELATION, key=len, reverse=True) if f' {w} ' in text), None)
    if relation: parts = text.split(f' {relation} ')
    else: # after a noun, for "big and red dog" is one
        ends = [m for m in re.finditer(' and ', text) if text[:m.start()].split()[-1] in NOUNS]
        parts = [text[:ends[0].start()], text[ends[0].end():]] if ends else [text]
    def mention(phrase):
        *described, noun = phrase.replace(' and ', ' ').split()
        number = {'two': 2, 'three': 3}.get(described[0] if described else '', 1)
        said = [SAID[w] for w in described[number > 1:]]
        return iw.Mention(NOUNS[noun], next((s for s in said if s in iw.COLOURS), ''), next((s for s in said if s in iw.SIZES), ''), number)
    return iw.Statement(tuple(map(mention, parts)), RELATION.get(relation, ''))

@given(st.integers(0, 100_000), st.sampled_from(list(iw.ADDED)))
@settings(max_examples=400, deadline=None)
def test_the_worlds_half_truths_are_false_and_their_refinements_true(index, change):
    rng, scene = np.random.default_rng([2, index]), iw.scene_at(0, 'test', index)
    made = iw.half_truth(scene, change, rng)
    texts = made and iw.half_truth_texts(*made, iw.Style(rng))
    if not texts: return
    anchor, truthful, wrong = map(reading, texts)
    assert (truthful, wrong) == made # the texts say what the statements claim
    assert iw.holds(scene, anchor) and iw.holds(scene, truthful) and not iw.holds(scene, wrong, loose=True)
    assert len(texts[1].split()) == len(texts[2].split()) > len(texts[0].split()) and texts[1].startswith(texts[0])
    a, b = truthful.mentions
    if change == 'swap': assert wrong == iw.Statement((b, a), truthful.relation) and truthful.relation
    elif change == 'predicate': assert wrong.mentions == (a, b) and wrong.relation != truthful.relation != ''
    else:
        assert wrong.mentions[0] == a and (wrong.mentions[1].noun != b.noun) == (change == 'object') and wrong.relation == truthful.relation == ''
        assert not iw.holds(scene, iw.Statement(wrong.mentions[1:]), loose=True)


def test_the_worlds_rows_are_the_diagnostics(tmp_path):
    counts = iw.write_world_half_truths(tmp_path, pictures=80, n=12)
    rows = un.read_half_truths(tmp_path/'half_truth.jsonl')
    assert counts == dict.fromkeys(iw.ADDED, 12) and len(rows) == 48 and iw.ADDED == un.ADDED
    for row in rows:
        index = int(row.image[-10:-4]) - 1
        scene = iw.scene_at(0, 'test', index)
        assert row.image == f'test/{iw.picture_name("test", index)}'
        assert iw.holds(scene, reading(row.anchor)) and iw.holds(scene, reading(row.truthful)) and not iw.holds(scene, reading(row.half_truth), loose=True)
    before = (tmp_path/'half_truth.jsonl').read_bytes()
    iw.write_world_half_truths(tmp_path, pictures=80, n=12)
    assert (tmp_path/'half_truth.jsonl').read_bytes() == before


def test_words_alone_do_not_tell_half_truths():
    for change in iw.ADDED:
        pairs = [item[-2:] for item in iw.half_truth_items(0, 2_000, change, 120)]
        assert iw.blind_accuracy(*zip(*pairs), paired=True) < .6, change

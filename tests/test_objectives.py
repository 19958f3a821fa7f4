import re, zlib
from collections import Counter
import numpy as np, pytest, torch, torch.nn.functional as F
from hypothesis import given, strategies as st
from cs_clip.data import Foil, Record, Records, Unit, UnitFoil
from cs_clip.files import CSClipError
from cs_clip.losses import attention_loss, hinge, info_nce, negclip, sigmoid_loss, unit_loss
from cs_clip.objectives import C2LIP, ClipFT, NegCLIP, SceneGraphs, SigLIPFT, UnitSupervision, nearest, objective_class, unique_batch
from tiny_clip import tiny_records

RNG = lambda: np.random.default_rng(0)

def embed(texts):
    "An embedding that depends on the text alone."
    return F.normalize(torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(zlib.crc32(t.encode()))) for t in texts]), dim=-1)

def plain(batch, role): return [(batch.images if role == 'image' else batch.texts)[i] if i >= 0 else None for i in batch.rows[role]]


def test_sg_and_clip_ft_see_the_same_images_and_captions():
    records = tiny_records()
    sg, ft = SceneGraphs(records), ClipFT(records)
    assert len(sg.items) == 36
    for items in ([0, 1, 2, 3], [35, 0, 7, 7]):
        a, b = sg.sample(items, RNG()), ft.sample(items, RNG())
        assert plain(a, 'image') == plain(b, 'image') and plain(a, 'text') == plain(b, 'text')
        assert all(n != t for n, t in zip(plain(a, "negative"), plain(a, "text")))


@pytest.mark.parametrize('method', [ClipFT, SceneGraphs])
def test_balanced_kinds_come_equally_often_and_no_negative_is_left_out(method):
    foils = [[Foil('add_obj', f'a{i}{n}') for n in range(3)] for i in range(4)]
    foils[2].append(Foil('swap_att', 's2'))
    records = Records([Record(f'{i}.png', (f'c{i}',), (i,), (tuple(f),), (None,)) for i, f in enumerate(foils)])
    kind = lambda item: records[item[0]].negatives[item[1]][item[2]].kind
    plain_items, balanced = method(records).items, method(records, balance=True).items
    assert Counter(map(kind, plain_items)) == {'add_obj': 12, 'swap_att': 1} and Counter(map(kind, balanced)) == {'add_obj': 12, 'swap_att': 12}
    assert set(balanced) == set(plain_items) and balanced == ClipFT(records, balance=True).items


def test_each_image_and_text_is_encoded_once():
    batch = SceneGraphs(tiny_records()).sample(list(range(36)), RNG())
    assert len(set(batch.images)) == len(batch.images) == 12 and len(set(batch.texts)) == len(batch.texts)


def test_sg_losses_are_those_of_independent_triplets():
    sg = SceneGraphs(tiny_records(), symmetric=True, margin=.3, hinge_weight=2.)
    batch = sg.sample([0, 1, 2, 5, 9], RNG())
    parts = sg.losses(embed(batch.images), embed(batch.texts), torch.tensor(1.), batch)
    image, text, foil = (embed(plain(batch, role)) for role in ('image', 'text', 'negative'))
    same = torch.tensor([[a == b for a in plain(batch, 'image')] for b in plain(batch, 'image')])
    assert same.sum() > 5
    assert torch.allclose(parts['info_nce'], info_nce(image, text, torch.tensor(1.), same, symmetric=True))
    assert torch.allclose(parts['hinge'], 2*hinge(image, text, foil, .3))


def test_negclip_doubles_the_batch_with_near_images_and_masks_what_is_missing():
    records = tiny_records()
    neg = NegCLIP(records, neighbours=2)
    neg.prepare(lambda names: embed(names))
    near = nearest(embed([r.image for r in records]), 2)
    items = [0, 2, 9]
    batch = neg.sample(items, RNG())
    images = plain(batch, 'image')
    assert len(images) == 6 and images[:3] == ['train/0.png', 'train/1.png', 'train/4.png']
    for item, hard in zip(items, images[3:]): assert hard in [records[j].image for j in near[item//2].tolist()]
    by_name = {r.image: r for r in records}
    for image, caption, shuffled, has in zip(images, plain(batch, 'text'), plain(batch, 'shuffled'), (batch.rows['shuffled'] >= 0).tolist()):
        c = by_name[image].captions.index(caption)
        assert has == (by_name[image].shuffled[c] is not None)
        if has: assert shuffled == by_name[image].shuffled[c]
    parts = neg.losses(embed(batch.images), embed(batch.texts), torch.tensor(1.), batch)
    has = batch.rows['shuffled'] >= 0
    expected = negclip(*(embed([t or '' for t in plain(batch, role)]) for role in ('image', 'text', 'shuffled')), torch.tensor(1.), has, batch.same_image())
    assert torch.allclose(parts['negclip'], expected)


def test_nearest_is_the_slow_loops():
    x = embed([str(i)*3 for i in range(23)])
    s = x @ x.T
    for chunk in (1, 5, 100):
        for i, row in enumerate(nearest(x, 4, chunk).tolist()):
            assert row == sorted((j for j in range(23) if j != i), key=lambda j: -s[i, j].item())[:4]
    with pytest.raises(CSClipError, match='too few'): nearest(x, 23)


def test_captions_without_negatives_are_no_items():
    records = Records([Record('1.png', ('a', 'b'), (1, 2), ((), ()), (None, None))])
    with pytest.raises(CSClipError, match='nothing to train on'): SceneGraphs(records)
    assert len(NegCLIP(records).items) == 2


def test_records_without_supervision_give_clip_ft_each_caption_once():
    plain_records = Records([Record('1.png', ('a', 'b'), (1, 2)), Record('2.png', ('c',), (3,))])
    assert ClipFT(plain_records).items == [(0, 0, 0), (0, 1, 0), (1, 0, 0)]
    for method in (SceneGraphs, NegCLIP):
        with pytest.raises(CSClipError, match='nothing to train on'): method(plain_records)
    mixed = Records([*plain_records, *tiny_records(2)])
    assert {mixed[r].image for r, _, _ in SceneGraphs(mixed).items} == {'train/0.png', 'train/1.png'}


def test_unknown_methods_are_listed():
    with pytest.raises(CSClipError, match='clip_ft, negclip, sg, units'): objective_class('clip-ft')


def test_parameters_name_the_methods_own():
    assert SceneGraphs(tiny_records(), margin=.2).parameters == {'symmetric': False, 'balance': False, 'margin': .2, 'hinge_weight': 1.}
    assert NegCLIP(tiny_records()).parameters == {'neighbours': 3}


def test_unique_batch_keeps_roles():
    batch = unique_batch(['a', 'b', 'a'], text=['x', 'y', 'x'], negative=['y', 'z', 'z'])
    assert (batch.images, batch.texts) == (['a', 'b'], ['x', 'y', 'z'])
    assert batch.rows['negative'].tolist() == [1, 2, 2]


def test_a_text_that_is_missing_has_no_row():
    batch = unique_batch(['a', 'b'], text=['x', 'y'], shuffled=[None, 'z'])
    assert batch.texts == ['x', 'y', 'z'] and batch.rows['shuffled'].tolist() == [-1, 2]


def unit_records():
    "Captions with both kinds of unit, with entities alone, with units without foils, and with no unit; two captions of one image."
    def entity(name, foil=True): return Unit('entity', name, (UnitFoil('object', f'not {name}', f'a not {name}'),) if foil else ())
    def relation(a, b): return Unit('relation', f'{a} on {b}', tuple(UnitFoil(c, f'{a} {c} {b}', f'a {a} {c} a {b}') for c in ('predicate', 'swap')), (0, 1))
    def record(i, *units): return Record(f'{i}.png', tuple(f'c{i}{k}' for k in range(len(units))), tuple(10*i + k for k in range(len(units))),
                                         ((),)*len(units), (None, f's{i}')[:len(units)], units)
    both = entity('cat'), entity('mug'), entity('dog', False), relation('cat', 'mug'), relation('cat', 'dog')
    return Records([record(0, both, (entity('cat'), entity('mug'))), record(1, (entity('dog', False),)), record(2, ()), record(3, (entity('cat'),))])

def drawn(objective, n=400, **at):
    rng, units = RNG(), objective.records[0].units[0]
    return [d for _ in range(n) for d in objective.draw(at.get('units', units), rng)]


def test_units_and_foils_are_one_captions_and_one_edit_apart():
    records = unit_records()
    texts = {u.text: {f.text: f.sentence for f in u.foils} for u in records[0].units[0]}
    for unit, foil, sentence, _ in drawn(UnitSupervision(records)):
        parts = unit.split(' and ')
        assert 1 <= len(parts) <= 2 and len(set(parts)) == len(parts) and all(p in texts for p in parts)
        others = foil.split(' and ')
        changed = [(a, b) for a, b in zip(parts, others, strict=True) if a != b]
        assert len(changed) == 1 and texts[changed[0][0]][changed[0][1]] == sentence
        if ' on ' in unit: assert len(parts) == 1


def test_conjunctions_keep_their_order_and_come_in_every_order():
    pairs = {(u, f) for u, f, *_ in drawn(UnitSupervision(unit_records(), p_rel=0)) if ' and ' in u}
    assert {('cat and mug', 'not cat and mug'), ('cat and mug', 'cat and not mug'), ('mug and cat', 'not mug and cat')} < pairs
    assert all(' and ' not in u for u, *_ in drawn(UnitSupervision(unit_records(), max_conjunction=1)))
    assert max(len(u.split(' and ')) for u, *_ in drawn(UnitSupervision(unit_records(), p_rel=0, max_conjunction=5))) == 3


@pytest.mark.parametrize('p_rel', [0., .3, 1.])
def test_relations_come_as_often_as_asked(p_rel):
    found = [' on ' in u for u, *_ in drawn(UnitSupervision(unit_records(), n_units=1, p_rel=p_rel), 2000)]
    assert abs(np.mean(found) - p_rel) < .03


def test_a_kind_that_is_not_wanted_is_not_put_in_its_place():
    records = unit_records()
    assert drawn(UnitSupervision(records, p_rel=1.), 1, units=records[0].units[1]) == [(None,)*4]*2
    assert all(u for u, *_ in drawn(UnitSupervision(records, p_rel=.99), 5, units=records[0].units[1]))


def test_slots_hold_different_pairs_and_stay_empty_when_there_are_no_more():
    for a, b in zip(*[iter(drawn(UnitSupervision(unit_records(), max_conjunction=1)))]*2): assert a[:2] != b[:2]
    one = drawn(UnitSupervision(unit_records(), p_rel=1.), units=unit_records()[0].units[0][3:4]) # a relation alone: both its foils
    assert {frozenset((a[1], b[1])) for a, b in zip(*[iter(one)]*2)} == {frozenset(('cat predicate mug', 'cat swap mug'))}
    units = UnitSupervision(unit_records())
    assert drawn(units, 1, units=units.records[1].units[0]) == [('dog', None, None, {'dog'}), (None,)*4]
    assert drawn(units, 1, units=()) == [(None,)*4]*2


def test_unit_losses_are_those_of_the_paper():
    units, z = UnitSupervision(unit_records(), lambda_u=.7), torch.tensor(1.)
    assert len(units.items) == 5
    batch = units.sample([0, 1, 2, 3, 4, 0], RNG())
    parts = units.losses(embed(batch.images), embed(batch.texts), z, batch)
    image, text, shuffled = (embed([t or '' for t in plain(batch, role)]) for role in ('image', 'text', 'shuffled'))
    assert torch.allclose(parts['negclip'], negclip(image, text, shuffled, z, torch.tensor([t is not None for t in plain(batch, 'shuffled')]), batch.same_image()))
    stacked = {role: [plain(batch, f'{role} {k}') for k in range(2)] for role in ('unit', 'foil')}
    has = {role: torch.tensor([[t is not None for t in slot] for slot in slots]) for role, slots in stacked.items()}
    assert not has['unit'].all() and not has['foil'].eq(has['unit']).all()
    vectors = {role: torch.stack([embed([t or '' for t in slot]) for slot in slots]) for role, slots in stacked.items()}
    says = {r.image: {u.text for caption in r.units for u in caption} for r in units.records}
    same = torch.tensor([[[x == y or b is not None and set(b.split(' and ')) <= says[x] for b, y in zip(slot, plain(batch, 'image'))]
                          for x in plain(batch, 'image')] for slot in stacked['unit']])
    assert same.sum() > batch.same_image().sum()*2 # 'cat' is said of two images
    assert torch.allclose(parts['unit'], .7*unit_loss(image, vectors['unit'], vectors['foil'], z, has['unit'], has['foil'], same))


def test_what_a_picture_is_known_to_show_is_none_of_its_negatives():
    mug, red = Unit('entity', 'mug', ()), Unit('entity', 'big Red mug', ())
    units = UnitSupervision(Records([Record(f'{i}.png', ('c',), (i,), ((),), (None,), (u,)) for i, u in enumerate([(mug,), (red,), (mug, red)])]),
                            n_units=1, max_conjunction=1)
    batches = [units.sample([0, 1, 2], np.random.default_rng(seed)) for seed in range(9)]
    for batch in batches: # a big red mug is a mug; a mug need not be red
        assert batch.said.tolist()[0][:2] == [[True, False, plain(batch, 'unit 0')[2] == 'mug'], [True]*3]
    assert len({plain(batch, 'unit 0')[2] for batch in batches}) == 2
    assert UnitSupervision(units.records, lambda_u=0).sample([0], RNG()).said is None


def test_ablations_change_what_they_name_and_draw_alike():
    records, z, items = unit_records(), torch.tensor(1.), [0, 2, 4]
    def run(**kw):
        batch = (units := UnitSupervision(records, **kw)).sample(items, RNG())
        return batch, units.losses(embed(batch.images), embed(batch.texts), z, batch)
    full, parts = run()
    bare, bare_parts = run(foils='none')
    assert [plain(full, f'unit {k}') for k in range(2)] == [plain(bare, f'unit {k}') for k in range(2)] and 'foil 0' not in bare.rows
    assert bare_parts['unit'] < parts['unit'] and bare_parts['negclip'] == parts['negclip']
    clip, clip_parts = run(global_negatives=False, lambda_u=0)
    assert list(clip.rows) == ['image', 'text'] and clip.texts == ['c00', 'c10', 'c30']
    assert torch.allclose(clip_parts['info_nce'], info_nce(embed(clip.images), embed(clip.texts), z, symmetric=True))
    placed, placed_parts = run(foils='sentence', lambda_u=0)
    sentences = plain(placed, 'sentence 0') + plain(placed, 'sentence 1')
    hard = plain(placed, 'shuffled') + sentences
    expected = negclip(embed(clip.images), embed(clip.texts), embed([t or '' for t in hard]), z, torch.tensor([t is not None for t in hard]))
    assert list(placed_parts) == ['negclip'] and torch.allclose(placed_parts['negclip'], expected) and any(sentences)
    with pytest.raises(CSClipError, match='unit, sentence, none'): UnitSupervision(records, foils='both')


def test_a_step_of_units_has_finite_gradients_everywhere():
    units = UnitSupervision(unit_records())
    batch = units.sample([0, 1, 2, 3, 4], RNG())
    image, text = (embed(x).requires_grad_() for x in (batch.images, batch.texts))
    sum(units.losses(image, text, torch.tensor(4.6), batch).values()).backward()
    assert image.grad.isfinite().all() and text.grad.isfinite().all() and (text.grad.abs().sum(1) > 0).all()


# ---- C²LIP
def c2lip_batch(items=(0, 1, 7, 13, 7), **own):
    objective = C2LIP(tiny_records(), **own)
    return objective, objective.sample(list(items), np.random.default_rng(0))


@pytest.mark.parametrize('captions', [1, 2])
def test_concepts_of_a_batch_stand_once_and_belong_to_all_their_images(captions):
    objective, batch = c2lip_batch(captions_per_text=captions)
    picked = objective.picked([0, 1, 7, 13, 7])
    texts = [batch.texts[n] for n in batch.rows['concept']]
    assert len(set(texts)) == len(texts) and set(texts) == {t for r, said in picked for c in said for t in r.concepts[c]}
    named = {r.image: {t for caption in r.concepts for t in caption} for r in objective.records}
    assert batch.belongs.tolist() == [[t in named[image] for t in texts] for image in batch.images]
    assert len(batch.rows['text']) == 5 and len(batch.images) == 3  # items 0 and 1 are one picture, and so is 7 twice


def test_c2lip_is_the_sum_of_its_losses():
    objective, batch = c2lip_batch(lambda_npc=.7, lambda_xac=.3)
    g = torch.Generator().manual_seed(0)
    unit = lambda *shape: torch.nn.functional.normalize(torch.randn(*shape, 8, generator=g, dtype=torch.float64), dim=-1).requires_grad_()
    image, text, tokens = unit(len(batch.images)), unit(len(batch.texts)), unit(len(batch.images), 5)
    scale, bias = torch.tensor(2.), torch.tensor(-3.)
    parts = objective.losses(image, text, scale, batch, bias, tokens)
    concept, rows = text[batch.rows['concept']], batch.rows
    same = torch.tensor([[a == b or s == t for b, t in zip(rows['image'], rows['text'])] for a, s in zip(rows['image'], rows['text'])])
    assert torch.allclose(parts['sigmoid'], sigmoid_loss(image[rows['image']], text[rows['text']], scale, bias, same))
    assert torch.allclose(parts['npc'], .7*sigmoid_loss(image, concept, scale, bias, batch.belongs))
    assert torch.allclose(parts['xac'], .3*attention_loss(tokens, concept, scale, bias, batch.belongs))
    parts['xac'].backward(retain_graph=True)
    others = torch.ones(len(text), dtype=torch.bool).index_fill(0, rows['concept'], False)
    assert image.grad is None and tokens.grad.abs().sum() > 0 and text.grad[others].abs().sum() == 0  # captions are no concepts
    parts['npc'].backward()
    assert image.grad.abs().sum() > 0


def test_concepts_are_asked_for_only_where_they_teach():
    assert not SigLIPFT.visual_tokens and SigLIPFT.sigmoid and not ClipFT.sigmoid
    assert C2LIP(tiny_records()).visual_tokens and not C2LIP(tiny_records(), lambda_xac=0.).visual_tokens
    assert C2LIP(tiny_records()).parameters == {'captions_per_text': 1, 'lambda_npc': 1., 'lambda_xac': .01}  # the paper's
    bare = Records([Record('1.png', ('a mug',), (1,))])
    assert SigLIPFT(bare).items == [(0, 0)]
    with pytest.raises(CSClipError, match='is the supervision empty'): C2LIP(bare)


def test_what_a_caption_implies_is_no_negative():
    "'big red mug' names a red mug and a mug: pairs that other images' concepts make with its image are left out, in both losses."
    records = Records([Record('0.png', ('a big red mug',), (0,), concepts=(('big red mug',),)), Record('1.png', ('a mug and a cat',), (1,), concepts=(('mug', 'cat'),))])
    objective = C2LIP(records)
    batch, g = objective.sample([0, 1], RNG()), torch.Generator().manual_seed(0)
    named = [batch.texts[i] for i in batch.rows['concept']]
    text, image, tokens = (torch.nn.functional.normalize(torch.randn(*s, 4, generator=g), dim=-1) for s in ((len(batch.texts),), (2,), (2, 3)))
    text.requires_grad_()
    for part in 'npc', 'xac':
        parts = objective.losses(image[:1].repeat(2, 1)*torch.tensor([[1.], [0.]]), text, torch.tensor(1.), batch, torch.tensor(-1.), tokens*torch.tensor([1., 0.])[:, None, None])
        pulls = torch.autograd.grad(parts[part], text)[0][batch.rows['concept']]
        assert not pulls[named.index('mug')].any() and pulls[named.index('cat')].any()  # from image 0, the only one that is not zero


def test_a_foil_that_another_caption_says_is_not_drawn():
    records = unit_records()
    assert {f for _, f, *_ in drawn(UnitSupervision(records))} >= {'not mug'}
    known = {'not mug', 'cat swap mug'}
    found = {f for d in range(200) for _, f, *_ in UnitSupervision(records).draw(records[0].units[0], np.random.default_rng(d), known)}
    assert not any(f and (f.startswith('not mug') or f == 'cat swap mug') for f in found) and any(found)


@given(n=st.integers(1, 5), k=st.integers(1, 6), c=st.integers(0, 4))
def test_a_text_of_several_captions(n, k, c):
    "It begins with the item's own, has no caption twice and no more than there are, and an epoch begins with each once."
    c, captions = c % n, tuple(f'{i} mugs' + '.'*(i % 2) for i in range(n))
    records = Records([Record('1.png', captions, tuple(range(n))), Record('2.png', ('a mug',)*max(n, k), tuple(range(5, 5 + max(n, k))))])
    objective = SigLIPFT(records, captions_per_text=k)
    assert objective.items[:n] == [(0, i) for i in range(n)]
    with pytest.raises(CSClipError, match=f'captions_per_text is 7; expected at most {max(n, k)}'): SigLIPFT(records, captions_per_text=7)
    text = objective.sample([c], RNG()).texts[0]
    said = [int(i) for i in re.findall(r'(\d) mugs', text)]
    assert said == [(c + i) % n for i in range(min(n, k))]
    assert text == captions[c] if len(said) == 1 else text == '. '.join(f'{i} mugs' for i in said) + '.'


@pytest.mark.parametrize('captions', [1, 2])
def test_siglip_and_c2lip_see_the_same_captions(captions):
    same = SigLIPFT(tiny_records(), captions), C2LIP(tiny_records(), captions)
    assert same[0].items == same[1].items
    a, b = (o.sample([3, 4, 9], np.random.default_rng(0)) for o in same)
    assert a.images == b.images and [a.texts[n] for n in a.rows['text']] == [b.texts[n] for n in b.rows['text']]

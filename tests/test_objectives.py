import zlib
from collections import Counter
import numpy as np, pytest, torch, torch.nn.functional as F
from cs_clip.data import Foil, Record, Records
from cs_clip.files import CSClipError
from cs_clip.losses import hinge, info_nce, negclip
from cs_clip.objectives import ClipFT, NegCLIP, SceneGraphs, nearest, objective_class, unique_batch
from tiny_clip import tiny_records

RNG = lambda: np.random.default_rng(0)

def embed(texts):
    "An embedding that depends on the text alone."
    return F.normalize(torch.stack([torch.randn(6, generator=torch.Generator().manual_seed(zlib.crc32(t.encode()))) for t in texts]), dim=-1)

def plain(batch, role): return [(batch.images if role == 'image' else batch.texts)[i] for i in batch.rows[role]]


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
    for image, caption, shuffled, has in zip(images, plain(batch, 'text'), plain(batch, 'shuffled'), batch.has.tolist()):
        c = by_name[image].captions.index(caption)
        assert has == (by_name[image].shuffled[c] is not None)
        if has: assert shuffled == by_name[image].shuffled[c]
    parts = neg.losses(embed(batch.images), embed(batch.texts), torch.tensor(1.), batch)
    expected = negclip(*(embed(plain(batch, role)) for role in ('image', 'text', 'shuffled')), torch.tensor(1.), batch.has, batch.same_image())
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
    with pytest.raises(CSClipError, match='clip_ft, negclip, sg'): objective_class('clip-ft')


def test_parameters_name_the_methods_own():
    assert SceneGraphs(tiny_records(), margin=.2).parameters == {'symmetric': False, 'balance': False, 'margin': .2, 'hinge_weight': 1.}
    assert NegCLIP(tiny_records()).parameters == {'neighbours': 3}


def test_unique_batch_keeps_roles():
    batch = unique_batch(['a', 'b', 'a'], text=['x', 'y', 'x'], negative=['y', 'z', 'z'])
    assert (batch.images, batch.texts) == (['a', 'b'], ['x', 'y', 'z'])
    assert batch.rows['negative'].tolist() == [1, 2, 2]

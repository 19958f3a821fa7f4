"""Each loss against the same formula written as a loop over pairs."""
import math
import pytest, torch, torch.nn.functional as F
from cs_clip.files import CSClipError
from cs_clip.losses import hinge, info_nce, negclip, unit_loss

B, D = 7, 5
SAME = torch.tensor([[i % 5 == j % 5 for j in range(B)] for i in range(B)])  # items 0 and 5, 1 and 6 share an image

@pytest.fixture
def xs():
    g = torch.Generator().manual_seed(0)
    return [F.normalize(torch.randn(B, D, generator=g, dtype=torch.float64), dim=-1).requires_grad_() for _ in range(3)]

def s(a, b): return sum(x.item()*y.item() for x, y in zip(a, b))

def softmax_loss(own, others, scale): return math.log(sum(math.exp(scale*x) for x in [own, *others])) - scale*own

def loop(a, b, scale, same, foils=None, has=None):
    "Mean over i of -log softmax of i's partner among the texts that are not masked, and the foils that exist."
    total = 0
    for i in range(B):
        others = [s(a[i], b[j]) for j in range(B) if j != i and not (same is not None and same[i, j])]
        if foils is not None: others += [s(a[i], foils[j]) for j in range(B) if has is None or has[j]]
        total += softmax_loss(s(a[i], b[i]), others, scale)
    return total/B


@pytest.mark.parametrize('same', [None, SAME, torch.eye(B, dtype=torch.bool)])
@pytest.mark.parametrize('scale', [0., 2.6, 4.6])
def test_info_nce(xs, same, scale):
    image, text, _ = xs
    there, back = loop(image, text, math.exp(scale), same), loop(text, image, math.exp(scale), same)
    assert math.isclose(info_nce(image, text, torch.tensor(scale), same).item(), there, rel_tol=1e-6)
    assert math.isclose(info_nce(image, text, torch.tensor(scale), same, symmetric=True).item(), (there + back)/2, rel_tol=1e-6)


def test_info_nce_without_mask_is_open_clips(xs):
    from open_clip.loss import ClipLoss
    image, text, _ = (x.float() for x in xs)
    assert torch.allclose(info_nce(image, text, torch.tensor(2.), symmetric=True), ClipLoss()(image, text, torch.tensor(2.).exp()))


@pytest.mark.parametrize('margin', [0., .1, 2.])
def test_hinge(xs, margin):
    image, text, foil = xs
    expected = sum(max(0, margin - s(i, t) + s(i, f)) for i, t, f in zip(*xs))/B
    assert math.isclose(hinge(image, text, foil, margin).item(), expected, rel_tol=1e-9)


@pytest.mark.parametrize('same', [None, SAME])
@pytest.mark.parametrize('has', [None, torch.tensor([i % 3 > 0 for i in range(B)])])
def test_negclip(xs, same, has):
    image, text, foil = xs
    expected = (loop(image, text, math.exp(2), same, foil, has) + loop(text, image, math.exp(2), same))/2
    assert math.isclose(negclip(image, text, foil, torch.tensor(2.), has, same).item(), expected, rel_tol=1e-6)


def test_masked_items_get_no_gradient(xs):
    image, text, foil = xs
    has = torch.zeros(B, dtype=torch.bool)
    loss = negclip(image, text, foil, torch.tensor(2., requires_grad=True), has, SAME)
    loss.backward()
    assert foil.grad.abs().sum() == 0 and all(x.grad.isfinite().all() for x in xs)
    image.grad = text.grad = None
    everything = torch.ones(B, B, dtype=torch.bool)
    info_nce(image, text, torch.tensor(2.), everything).backward()
    assert image.grad.abs().max() == 0 and text.grad.abs().max() == 0


def test_foreign_masks_are_refused(xs):
    with pytest.raises(CSClipError, match='same_image'): info_nce(xs[0], xs[1], torch.tensor(0.), SAME[:3])


def test_gradients(xs):
    scale = torch.tensor(1., dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda i, t, z: info_nce(i, t, z, SAME, symmetric=True), (xs[0], xs[1], scale))
    assert torch.autograd.gradcheck(lambda *a: negclip(*a, same_image=SAME), (*xs, scale))


K = 3
UNITS = torch.tensor([[(i + k) % 3 > 0 for i in range(B)] for k in range(K)])
FOILS = torch.tensor([[(i*(k + 2)) % 5 > 0 for i in range(B)] for k in range(K)])
ALIKE = SAME | torch.tensor([[[(i + 2*j) % (k + 4) == 0 for j in range(B)] for i in range(B)] for k in range(K)]) # one way or both ways

@pytest.fixture
def slots():
    g = torch.Generator().manual_seed(1)
    return [F.normalize(torch.randn(K, B, D, generator=g, dtype=torch.float64), dim=-1).requires_grad_() for _ in range(2)]

def unit_loop(image, unit, foil, scale, has_unit, has_foil, same):
    "The formula of the paper, image by image and slot by slot."
    total = 0
    for k in range(K):
        there = [i for i in range(B) if has_unit is None or has_unit[k, i]]
        for i in there:
            rivals = lambda alike: [j for j in there if j != i and not (same is not None and alike(j))]
            own = [] if foil is None or has_foil is not None and not has_foil[k, i] else [s(image[i], foil[k, i])]
            own_score = s(image[i], unit[k, i])
            to_text = softmax_loss(own_score, [s(image[i], unit[k, j]) for j in rivals(lambda j: same[k, i, j])] + own, scale)
            to_image = softmax_loss(own_score, [s(image[j], unit[k, i]) for j in rivals(lambda j: same[k, j, i])], scale)
            total += (to_text + to_image)/2/len(there)
    return total/K


@pytest.mark.parametrize('has_unit', [None, UNITS])
@pytest.mark.parametrize('has_foil', [None, FOILS, torch.zeros(K, B, dtype=torch.bool)])
@pytest.mark.parametrize('same', [None, ALIKE])
@pytest.mark.parametrize('scale', [0., 4.6])
def test_unit_loss_is_the_loop(xs, slots, has_unit, has_foil, same, scale):
    loss = unit_loss(xs[0], *slots, torch.tensor(scale, dtype=torch.float64), has_unit, has_foil, same)
    assert abs(loss.item() - unit_loop(xs[0], *slots, math.exp(scale), has_unit, has_foil, same)) < 1e-6
    if has_foil is None:
        plain = unit_loss(xs[0], slots[0], None, torch.tensor(scale, dtype=torch.float64), has_unit, same=same)
        assert abs(plain.item() - unit_loop(xs[0], slots[0], None, math.exp(scale), has_unit, None, same)) < 1e-6


def test_units_by_hand():
    "Two images at right angles, τ = 1; the first image's foil is at 0.6 of it, the second's unit is at 0.8 of its image and has no foil."
    image = torch.eye(2, dtype=torch.float64)
    unit = torch.tensor([[[1., 0.], [.6, .8]]], dtype=torch.float64)
    foil = torch.tensor([[[.6, .8], [1., 0.]]], dtype=torch.float64)
    e = math.exp
    to_text = -math.log(e(1)/(e(1) + e(.6) + e(.6))) - math.log(e(.8)/(e(0) + e(.8)))
    to_image = -math.log(e(1)/(e(1) + e(0))) - math.log(e(.8)/(e(.6) + e(.8)))
    loss = unit_loss(image, unit, foil, torch.tensor(0.), has_foil=torch.tensor([[True, False]]))
    assert math.isclose(loss.item(), (to_text + to_image)/2/2, rel_tol=1e-12)


def test_another_images_foil_does_not_count(xs, slots):
    image, foil = xs[0], slots[1]
    loss = unit_loss(image, slots[0], foil, torch.tensor(1.))
    parts = [torch.autograd.grad(unit_loss(image, slots[0], foil, torch.tensor(1.), has_foil=one), foil)[0]
             for one in torch.eye(B, dtype=torch.bool)[:, None].expand(B, K, B)]
    assert all(p.abs().sum((0, 2)).nonzero().flatten().tolist() == [i] for i, p in enumerate(parts))
    assert torch.allclose(sum(parts), torch.autograd.grad(loss, foil)[0])


def test_masked_units_get_no_gradient(xs, slots):
    unit_loss(xs[0], *slots, torch.tensor(2.), UNITS, FOILS, ALIKE).backward()
    assert (slots[0].grad.abs().sum(-1) > 0).eq(UNITS).all() and (slots[1].grad.abs().sum(-1) > 0).eq(UNITS & FOILS).all()
    nothing = torch.zeros(K, B, dtype=torch.bool)
    assert unit_loss(xs[0], *slots, torch.tensor(2.), nothing).item() == 0


def test_unit_gradients(xs, slots):
    scale = torch.tensor(1., dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda i, u, f, z: unit_loss(i, u, f, z, UNITS, FOILS, ALIKE), (xs[0], *slots, scale))

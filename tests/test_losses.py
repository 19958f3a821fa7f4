"""Each loss against the same formula written as a loop over pairs."""
import math
import pytest, torch, torch.nn.functional as F
from cs_clip.files import CSClipError
from cs_clip.losses import hinge, info_nce, negclip

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

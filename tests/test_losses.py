"""Each loss against the same formula written as a loop over pairs."""
import math, subprocess, sys
import pytest, torch, torch.nn.functional as F
from cs_clip.files import CSClipError
from cs_clip.losses import attend, attention_loss, hinge, info_nce, negclip, sigmoid_loss, unit_loss

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


N, M, L = 6, 4, 3
BELONGS = torch.tensor([[(n + m) % 3 == 0 or n == m for n in range(N)] for m in range(M)])  # several concepts an image, several images a concept

@pytest.fixture
def concepts():
    "Tokens [M, L, D], images [M, D] and concepts [N, D] of length 1; concept 4 is concept 1 again."
    g = torch.Generator().manual_seed(2)
    tokens, image, concept = (F.normalize(torch.randn(*shape, D, generator=g, dtype=torch.float64), dim=-1) for shape in ((M, L), (M,), (N,)))
    concept[4] = concept[1]
    return [x.requires_grad_() for x in (tokens, image, concept)]

def minus_log_sigmoid(z): return math.log(1 + math.exp(-z))

def sigmoid_loop(image, text, scale, bias, positive):
    "Pair by pair, as the formula stands."
    return sum(minus_log_sigmoid((1 if positive[m, n] else -1)*(scale*s(v, c) + bias))
               for m, v in enumerate(image) for n, c in enumerate(text))/len(text)

def attention_loop(tokens, concept, scale, bias, positive):
    "Each concept and each picture: the softmax over its tokens, the pooled vector, its length, the pair."
    total = 0
    for m, xs in enumerate(tokens.tolist()):
        for n, c in enumerate(concept.tolist()):
            weights = [math.exp(sum(a*b for a, b in zip(x, c))) for x in xs]
            pooled = [sum(w*x[d] for w, x in zip(weights, xs))/sum(weights) for d in range(D)]
            length = math.sqrt(sum(p*p for p in pooled))
            z = scale*sum(p*a for p, a in zip(pooled, c))/length + bias
            total += minus_log_sigmoid(z if positive[m, n] else -z)
    return total/len(concept)

T, BIAS = math.log(5), -2.

@pytest.mark.parametrize('bias', [0., -10.])
def test_sigmoid_loss_is_the_loop_and_open_clips(xs, bias):
    from open_clip.loss import SigLipLoss
    image, text, _ = xs
    own, scale, b = torch.eye(B, dtype=torch.bool), torch.tensor(T, dtype=torch.float64), torch.tensor(bias, dtype=torch.float64)
    loss = sigmoid_loss(image, text, scale, b, own)
    assert abs(loss.item() - sigmoid_loop(image, text, 5, bias, own)) < 1e-6
    assert torch.allclose(loss, SigLipLoss()(image, text, scale.exp(), b))
    assert abs(sigmoid_loss(image, text, scale, b, own | SAME).item() - sigmoid_loop(image, text, 5, bias, own | SAME)) < 1e-6


def test_concept_losses_are_the_loops(concepts):
    tokens, image, concept = concepts
    scale, b = torch.tensor(T, dtype=torch.float64), torch.tensor(BIAS, dtype=torch.float64)
    assert abs(sigmoid_loss(image, concept, scale, b, BELONGS).item() - sigmoid_loop(image, concept, 5, BIAS, BELONGS)) < 1e-6
    expected = attention_loop(tokens, concept, 5, BIAS, BELONGS)
    for chunk in 1, 4, 64: assert abs(attention_loss(tokens, concept, scale, b, BELONGS, chunk).item() - expected) < 1e-6


def test_unknown_pairs_cost_nothing_and_positives_stay(concepts):
    tokens, image, concept = concepts
    scale, b = torch.tensor(T, dtype=torch.float64), torch.tensor(BIAS, dtype=torch.float64)
    for unknown in torch.rand(4, *BELONGS.shape, generator=torch.Generator().manual_seed(0)) < .4:
        for name, given in ('image', image), ('tokens', tokens):
            loss = sigmoid_loss if name == 'image' else attention_loss
            one = lambda m, n: loss(given[m:m + 1], concept[n:n + 1], scale, b, BELONGS[m:m + 1, n:n + 1]).item()
            expected = sum(one(m, n) for m in range(len(given)) for n in range(N) if BELONGS[m, n] or not unknown[m, n])/N
            assert abs(loss(given, concept, scale, b, BELONGS, unknown=unknown).item() - expected) < 1e-6


def test_what_comes_twice_is_a_positive(concepts):
    "Concept 4 is concept 1 again. As a negative it pulls the image away from its own concept; as a positive it pulls as the first does."
    _, image, concept = concepts
    scale, b = torch.tensor(T, dtype=torch.float64), torch.tensor(BIAS, dtype=torch.float64)
    once, twice = BELONGS.clone(), BELONGS.clone()
    once[:, 4] = False
    twice[:, 4] = twice[:, 1]
    pulls = {name: torch.autograd.grad(sigmoid_loss(image, concept, scale, b, mask)*N, concept)[0] for name, mask in (('once', once), ('twice', twice))}
    assert torch.allclose(pulls['twice'][4], pulls['twice'][1]) and not torch.allclose(pulls['once'][4], pulls['once'][1])


def test_gradients_of_concept_losses(concepts):
    tokens, image, concept = concepts
    scale, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (T, BIAS))
    assert torch.autograd.gradcheck(lambda *a: sigmoid_loss(*a, BELONGS), (image, concept, scale, b))
    assert torch.autograd.gradcheck(lambda *a: attention_loss(*a, BELONGS, 4), (tokens, concept, scale, b))
    attention_loss(tokens, concept, scale, b, BELONGS).backward()
    assert image.grad is None and all(x.grad.isfinite().all() and x.grad.abs().sum() > 0 for x in (tokens, concept, scale, b))


def test_a_token_that_no_concept_likes_gets_less(concepts):
    tokens, _, concept = concepts
    a = attend(tokens, concept)
    assert a.shape == (M, N, L) and torch.allclose(a.sum(-1), torch.ones(M, N, dtype=torch.float64))
    assert (a.argmax(-1) == torch.einsum('mld,nd->mnl', tokens, concept).argmax(-1)).all()


def test_foreign_positives_are_refused(concepts):
    tokens, image, concept = concepts
    for loss, x in (sigmoid_loss, image), (attention_loss, tokens):
        with pytest.raises(CSClipError, match='positive'): loss(x, concept, torch.tensor(0.), torch.tensor(0.), BELONGS[:, :2])


MEMORY = """
import resource, torch, torch.nn.functional as F
from cs_clip.losses import attention_loss
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss*1024
tokens, concept = (F.normalize(torch.randn(*shape, 768), dim=-1).requires_grad_() for shape in ((96, 196), (600,)))
before = peak()
attention_loss(tokens, concept, torch.tensor(2.), torch.tensor(-10.), torch.rand(96, 600) < .02).backward()
print(peak() - before)
"""

def test_memory_at_the_papers_size():
    "96 images, 600 concepts, 196 tokens, 768 numbers each, forward and backward."
    out = subprocess.run([sys.executable, '-c', MEMORY], capture_output=True, text=True, check=True).stdout
    assert int(out) < 2*2**30

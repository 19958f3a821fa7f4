"The embedded text models on everyday captions: pairs labelled by hand (gold/inference.tsv) and the captions of gold/captions.txt; neither was trained on."
import csv
import re

import torch
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from cs_clip.files import project_root
from cs_clip.generation import MLMPropose, NLIRank, Verdict
from tests.gold import CAPTIONS, read_gold

MODELS = project_root()/'data/models'


def pairs():
    "(premise, hypothesis, whether it is a contradiction)."
    with open(CAPTIONS.with_name('inference.tsv'), encoding='utf-8', newline='') as f:
        return [(r['premise'], r['hypothesis'], {'yes': True, 'no': False}[r['contradiction']]) for r in csv.DictReader(f, delimiter='\t')]


def judged(texts):
    "What the inference model says of pairs: a label each."
    return [max(Verdict._fields, key=lambda label: getattr(verdict, label)) for verdict in NLIRank(MODELS/'nli')(texts)]


def test_pairs_labelled_by_hand():
    "Of everyday captions, each once, about half of them contradictory, and never two equal texts."
    rows = pairs()
    assert len(rows) == len(set(rows)) == 300 and .45 < sum(y for *_, y in rows)/300 < .55
    assert all(premise != hypothesis for premise, hypothesis, _ in rows)


def test_contradiction_of_everyday_captions():
    rows = pairs()
    labels = judged([(p, h) for p, h, _ in rows])
    right = [(label == 'contradiction') == y for label, (*_, y) in zip(labels, rows)]
    assert sum(right)/len(rows) >= .80, [(p, h) for ok, (p, h, _) in zip(right, rows) if not ok]


def test_no_everyday_caption_contradicts_itself():
    texts = sorted({p for p, *_ in pairs()} | {g.caption for graphs in read_gold().values() for g in graphs})
    scores = {t: v.contradiction for t, v in zip(texts, NLIRank(MODELS/'nli')([(t, t) for t in texts]))}
    assert sum(scores.values())/len(scores) < .2
    assert sum(v >= .5 for v in scores.values()) <= .02*len(scores), {t: v for t, v in scores.items() if v >= .5}


@torch.inference_mode()
def test_masked_words_of_unseen_captions():
    "Every word of the gold captions in turn: how often it is the model's first choice."
    propose = MLMPropose(MODELS/'mlm')
    mask, found = propose.tokenizer.mask_token, []
    for text in [g.caption for graphs in read_gold().values() for g in graphs]:
        for m in re.finditer(r'[A-Za-z]+', text): found.append((text[:m.start()] + mask + text[m.end():], m[0].lower()))
    best = propose._log_probabilities([t for t, _ in found])
    right = [logp is not None and propose.tokenizer.convert_ids_to_tokens(int(logp.argmax())) == word for (_, word), logp in zip(found, best)]
    assert len(right) > 2_000 and sum(right)/len(right) >= .35


def test_formats():
    "What any loader of such models relies on: the label's names, single precision once loaded, and sizes that fit a repository."
    nli = AutoModelForSequenceClassification.from_pretrained(MODELS/'nli')
    assert nli.config.id2label == {0: 'entailment', 1: 'neutral', 2: 'contradiction'}
    for model in (nli, AutoModelForMaskedLM.from_pretrained(MODELS/'mlm')): assert model.dtype == torch.float32
    for name in ('mlm', 'nli'): assert sum(f.stat().st_size for f in (MODELS/name).iterdir()) <= 12e6

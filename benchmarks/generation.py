"""Hard negatives against a plain loop over captions: the same models, captions and negatives, in one run.

    python benchmarks/generation.py                      the embedded models
    python benchmarks/generation.py --geometry papers    BERT-base and RoBERTa-large, weights drawn at random (an hour of CPU: --captions 8)

The plain loop is what scripts do: a caption at a time, each masked caption through the whole masked model, each candidate's pair through the
inference model. Beside it stands the bare time of the inference model's forward passes, which no engine of this recipe can be faster than."""
import argparse, tempfile, time
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, RobertaConfig, RobertaForSequenceClassification

from cs_clip import generation
from cs_clip.data import read_karpathy
from cs_clip.files import project_root
from cs_clip.generation import HardNegatives, MLMPropose, NLIRank, Verdict
from cs_clip.parsing import SceneGraphParser


class PlainPropose(MLMPropose):
    "A masked caption at a time, its whole length through the head."
    @torch.inference_mode()
    def __call__(self, slots):
        found = []
        for slot in slots:
            batch = self.tokenizer(slot.masked(self.tokenizer.mask_token), return_tensors='pt', truncation=True).to(self.device)
            logits = self.model(**batch).logits[0].float().log_softmax(-1)
            found.append(self._best(slot, logits[batch.input_ids[0] == self.tokenizer.mask_token_id][0].cpu()))
        return found


class PlainRank(NLIRank):
    "A pair at a time."
    @torch.inference_mode()
    def __call__(self, pairs):
        verdicts = []
        for premise, hypothesis in pairs:
            batch = self.tokenizer(premise, hypothesis, return_tensors='pt', truncation=True).to(self.device)
            p = self.model(**batch).logits[0].float().softmax(-1)[self.order].tolist()
            verdicts.append(Verdict(*(round(x, 4) for x in p)))
        return verdicts


class BareRank(NLIRank):
    "Measures its own forward passes alone."
    seconds, pairs = 0., 0

    def __call__(self, pairs):
        unique = list(dict.fromkeys(pairs))
        batches = [b for _, b in generation._inputs(self.tokenizer, generation._encode(self.tokenizer, self.model, unique), self.device, self.batch_size)]
        with torch.inference_mode(): self.seconds += timed(lambda: [self.model(**b).logits for b in batches])[0]
        self.pairs += len(unique)
        return super().__call__(pairs)


def timed(work):
    if torch.cuda.is_available(): torch.cuda.synchronize()
    start = time.perf_counter()
    result = work()
    if torch.cuda.is_available(): torch.cuda.synchronize()
    return time.perf_counter() - start, result


def papers_geometry(folder, mlm, nli):
    "Models of the papers' sizes with random weights, which read text as the given ones do."
    torch.manual_seed(0)
    words, labels = AutoTokenizer.from_pretrained(mlm), dict(enumerate(Verdict._fields))
    base = BertForMaskedLM(BertConfig(vocab_size=30522))
    large = RobertaForSequenceClassification(RobertaConfig(vocab_size=50265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
        intermediate_size=4096, max_position_embeddings=514, type_vocab_size=2, pad_token_id=0, initializer_range=.05, id2label=labels,
        label2id={v: k for k, v in labels.items()}))
    for model, name in (base, 'mlm'), (large, 'nli'):
        model.save_pretrained(folder/name), words.save_pretrained(folder/name)
    return folder/'mlm', folder/'nli'


def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument('--captions', type=int, default=256)
    a.add_argument('--geometry', choices=('embedded', 'papers'), default='embedded')
    a.add_argument('--device', default='cpu')
    a.add_argument('--precision', default='fp32', choices=list(generation.PRECISIONS))
    a.add_argument('--engine-only', action='store_true', help='no plain loop: captions a second alone')
    a = a.parse_args()
    root = project_root()
    mlm, nli = root/'data/models/mlm', root/'data/models/nli'
    records = read_karpathy(root/'data/icon_world/dataset_coco.json', 'train')
    captions = [r.captions[0] for r in records[:a.captions]]
    with tempfile.TemporaryDirectory() as folder:
        if a.geometry == 'papers': mlm, nli = papers_geometry(Path(folder), mlm, nli)
        parser, args = SceneGraphParser(), dict(device=a.device, precision=a.precision)
        engine = HardNegatives(parser, MLMPropose(mlm, **args), NLIRank(nli, **args))
        bare = HardNegatives(parser, engine.propose, BareRank(nli, **args))
        plain = HardNegatives(parser, PlainPropose(mlm, **args), PlainRank(nli, **args), chunk=1)
    for warm in (engine, plain): list(warm.generate(captions[:2]))
    ours, negatives = timed(lambda: list(engine.generate(captions)))
    list(bare.generate(captions))
    print(f'{len(captions)} captions, {a.geometry} models, {a.device}, {a.precision}, {torch.get_num_threads()} threads')
    print(f'engine        {ours:8.1f} s  {len(captions)/ours:8.1f} captions/s  {len(negatives)} negatives, {bare.rank.pairs} pairs ranked')
    print(f'bare passes   {bare.rank.seconds:8.1f} s  engine takes {ours/bare.rank.seconds:.2f} times as long')
    if a.engine_only: return
    loop, same = timed(lambda: [n for c in captions for n in plain.generate([c])])
    print(f'plain loop    {loop:8.1f} s  {loop/ours:.1f} times the engine; identical negatives: '
          f'{sum(x.text == y.text for x, y in zip(negatives, same))} of {max(len(negatives), len(same))}')


if __name__ == '__main__': main()

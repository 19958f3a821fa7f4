"""What is the texts' length, and what the concepts' doing? Beside the pipeline's runs on texts of two captions stands a control that it lacks: fine-tuning without
concepts on as many texts of one caption as of two. Scored are SugarCrepe (mean of kinds), half-truths of entities, and bare phrases: of "red dog" and "blue dog", for a
picture of a red dog and something blue, does the right one score higher?

    python benchmarks/text_lengths.py        after `make reproduce`; three trainings, six minutes
"""
from functools import cache
from statistics import mean, stdev

import torch

from cs_clip.benchmarks import read_benchmark
from cs_clip.data import ImageStore, Pixels, load_concepts
from cs_clip.evaluation import Embedder, evaluate
from cs_clip.files import project_root
from cs_clip.icon_world import draw, scene_at
from cs_clip.models import load
from cs_clip.objectives import OBJECTIVES, SigLIPFT
from cs_clip.stage import read_section
from cs_clip.training import run_parameters, train

ROOT, SEEDS = project_root(), (0, 1, 2)


class BothLengths(SigLIPFT):
    "Every other item is its own caption alone."
    def picked(self, items):
        return [(r, said[:1] if (n + said[0]) % 2 else said) for (r, said), n in zip(super().picked(items), (self.items[i][0] for i in items))]


OBJECTIVES['both_lengths'] = BothLengths # `train` writes a method's name beside its weights


def control(seed:int) -> str: # its folder
    p, settings = read_section(ROOT/'params.yaml', 'train'), read_section(ROOT/'params.yaml', 'siglip')
    common = {k: p[k] for k in ('steps', 'batch_size', 'lr', 'weight_decay', 'betas', 'warmup', 'precision', 'grad_clip', 'checkpoint_every', 'workers', 'tune')}
    own, loop = run_parameters('both_lengths', common, {'both_lengths': p['methods']['siglip_ft']})
    model, out = load(settings['model']), ROOT/f'artifacts/text_lengths/{seed}'
    train(BothLengths(load_concepts(ROOT/p['concepts']), **own), model, Pixels(ImageStore(ROOT/p['images']), model.preprocess, True), out, seed, **loop)
    return f'local-dir:{out}'


@cache
def phrases(n:int=1500) -> list[tuple[int, str, str]]: # test pictures with a phrase of each that is true, and the same noun in another thing's colour
    found = []
    for i in range(n):
        things = scene_at(0, 'test', i).things
        other = [t for t in things[1:] if t.noun != things[0].noun and t.colour != things[0].colour]
        if other: found.append((i, f'{things[0].colour} {things[0].noun}', f'{other[0].colour} {things[0].noun}'))
    return found


@torch.inference_mode()
def scores(name:str) -> list[float]: # SugarCrepe, half-truths, phrases; in percent
    p, model, rows = read_section(ROOT/'params.yaml', 'evaluate'), load(name), phrases()
    crepe = evaluate(Embedder(model), read_benchmark('sugar_crepe', sugar_crepe=ROOT/p['sugar_crepe'], images=ROOT/p['images']))
    half = evaluate(Embedder(model), read_benchmark('half_truth', half_truth=ROOT/p['half_truth'], images_root=ROOT/p['images_root']))
    images = torch.cat([model.encode_image(torch.stack([model.preprocess(draw(scene_at(0, 'test', i))) for i, *_ in rows[k:k + 256]])) for k in range(0, len(rows), 256)])
    true, false = ((images*model.encode_text(model.tokenize([row[k] for row in rows]))).sum(-1) for k in (1, 2))
    return [100*crepe['metrics']['subset_mean'], 100*half['subsets']['entity']['accuracy'], 100*(true > false).float().mean().item()]


if __name__ == '__main__':
    runs = ROOT/read_section(ROOT/'params.yaml', 'siglip')['trained']
    found = {'fine-tuned on one caption or two': [scores(control(s)) for s in SEEDS]} | {
        m: [scores(f'local-dir:{runs}/{m}-{s}') for s in SEEDS] for m in ('siglip_ft', 'siglip_ft-single', 'c2lip-npc', 'c2lip')}
    print(f'{"":34}{"SugarCrepe":>14}{"half-truths":>14}{"phrases":>14}')
    for m, seeds in found.items(): print(f'{m:34}' + ''.join(f'{f"{mean(v):.1f} ± {stdev(v):.1f}":>14}' for v in zip(*seeds)))

"Readers of benchmark files: what they accept, what they refuse by name, what is a fair controlled case."
import json, re, tempfile, zipfile
from pathlib import Path
import pytest
from cs_clip import icon_world as iw
from cs_clip.benchmarks import (
    BENCHMARKS, SUGAR_CREPE, SUGAR_CREPE_PP, VALSE, WHATSUP, Benchmark, Choice, colorswap, controlled, crop, gqa, read_benchmark, retrieval,
    sugar_crepe, sugar_crepe_pp, too_close, valse, vg_attribution, vg_relation, vl_checklist, whatsup, winoground, zero_shot,
    coco_spatial, distinct, gqa_spatial, near_duplicate)
from cs_clip.data import ImageStore
from cs_clip.evaluation import same_bag
from cs_clip.files import CSClipError, write_json
from PIL import Image
from tiny_clip import png

PAIR = {'filename': '1.png', 'caption': 'a red cat and a blue dog', 'negative_caption': 'a blue cat and a red dog'}
ITEM = {'image_path': '1.png', 'bbox_x': 1, 'bbox_y': 2, 'bbox_w': 9, 'bbox_h': 8, 'true_caption': 'the man is riding the horse',
        'false_caption': 'the horse is riding the man', 'relation_name': 'riding', 'attributes': ['red', 'blue']}


def crepe(folder, **files):
    for subset in SUGAR_CREPE: write_json(folder/f'{subset}.json', files.get(subset, {'0': PAIR}))
    return folder


def relations(*triples, **changes):
    return [{**ITEM, 'image_path': image, 'true_caption': f'the {s} is {r} the {o}', 'relation_name': r, **changes}
            for image, s, r, o in triples]


def attributes(*quadruples):
    return [{**ITEM, 'true_caption': f'the {a} {o} and the {b} {p}', 'attributes': [a, b]} for a, o, b, p in quadruples]


def cases(folder, relation_items, attribute_items, seed=0):
    write_json(folder/'r.json', relation_items)
    write_json(folder/'a.json', attribute_items)
    return controlled(folder/'r.json', folder/'a.json', folder, seed)


def test_sugar_crepe_with_gaps_in_its_ids(tmp_path):
    b = sugar_crepe(crepe(tmp_path/'s', swap_obj={'0': PAIR, '3': PAIR, '12': PAIR}), tmp_path)
    assert {c.id for c in b.choices if c.subset == 'swap_obj'} == {'swap_obj-0', 'swap_obj-3', 'swap_obj-12'}
    assert b.choices[0].texts == (PAIR['caption'], PAIR['negative_caption'])
    assert b.expected == SUGAR_CREPE and sum(SUGAR_CREPE.values()) == 7511


def test_expected_counts_beside_the_files(tmp_path):
    write_json(tmp_path/'expected.json', {'sugar_crepe': {k: 1 for k in SUGAR_CREPE}, 'vg_relation': 2})
    write_json(tmp_path/'r.json', [ITEM])
    assert sugar_crepe(crepe(tmp_path/'s'), tmp_path).expected == {k: 1 for k in SUGAR_CREPE}
    assert vg_relation(tmp_path/'r.json', tmp_path).expected == {'vg_relation': 2}
    assert vg_attribution(tmp_path/'r.json', tmp_path).expected == {'vg_attribution': 28748}


@pytest.mark.parametrize('text, message', [
    ('{"0": %s, "0": %s}' % (json.dumps(PAIR), json.dumps(PAIR)), 'add_att.json: "0" comes twice'),
    (json.dumps({'5': {k: v for k, v in PAIR.items() if k != 'negative_caption'}}), 'add_att.json: item "5": no key "negative_caption"'),
    (json.dumps({'5': {**PAIR, 'caption': ' '}}), 'item "5": "caption" is blank; expected text'),
    (json.dumps({'5': {**PAIR, 'caption': None}}), 'item "5": "caption" is null; expected text'),
    ('{}', 'add_att.json: no items'), ('[]', 'add_att.json: no items'), ('{"0": {"filename"', 'add_att.json: broken JSON')])
def test_sugar_crepe_refuses(tmp_path, text, message):
    (crepe(tmp_path)/'add_att.json').write_text(text)
    with pytest.raises(CSClipError) as e: sugar_crepe(tmp_path, tmp_path)
    assert message in str(e.value)


def test_sugar_crepe_without_one_of_its_files(tmp_path):
    (crepe(tmp_path)/'swap_att.json').unlink()
    with pytest.raises(CSClipError, match='swap_att.json: not found'): sugar_crepe(tmp_path, tmp_path)


@pytest.mark.parametrize('change, message', [
    ({'bbox_w': 0}, 'item 1: empty box'), ({'bbox_h': -3}, 'item 1: empty box'),
    ({'bbox_x': 'left'}, '"bbox_x" is "left"; expected a number'),
    ({'bbox_x': float('nan')}, 'item 1: empty box'), ({'true_caption': None}, 'item 1: "true_caption" is null'),
    ({'relation_name': 3, 'attributes': ['red']}, 'item 1: ')])
@pytest.mark.parametrize('reader', [vg_relation, vg_attribution])
def test_visual_genome_refuses(tmp_path, reader, change, message):
    (tmp_path/'vg.json').write_text(json.dumps([ITEM, {**ITEM, **change}]))
    with pytest.raises(CSClipError) as e: reader(tmp_path/'vg.json', tmp_path)
    assert 'vg.json: ' in str(e.value) and message in str(e.value)


def test_boxes_are_clipped():
    picture = Image.new('RGB', (20, 10))
    assert crop(picture, (5, 5, 5, 5))[1] is False and crop(picture, None)[0] is picture
    part, clipped = crop(picture, (-3, 5, 100, 100))
    assert part.size == (20, 5) and clipped
    for outside in ((20, 0, 4, 4), (-4, 0, 4, 4), (0, 10, 4, 4)):
        with pytest.raises(CSClipError, match='no pixel'): crop(picture, outside)


def test_what_is_too_close():
    for a, b in (('above', 'on top of'), ('riding', 'above'), ('couch', 'sofa'), ('dog', 'dogs'),
                 ('skateboard', 'skateboards'), ('gray', 'grey')):
        assert too_close(a, b) and too_close(b, a)
    for a, b in (('above', 'below'), ('to the left of', 'to the right of'), ('red', 'blue'), ('cat', 'cap'), ('holding', 'riding')):
        assert not too_close(a, b) and not too_close(b, a)


def test_a_vocabulary_is_cleaned_as_a_whole():
    words = {'couch': 3, 'sofa': 9, 'sofas': 2, 'bed': 1, 'skateboard': 4, 'skateboards': 4, 'gray': 1, 'grey': 2, 'above': 5, 'on top of': 6, 'riding': 7}
    kept = distinct(words)
    assert kept == ['above', 'bed', 'grey', 'riding', 'skateboard', 'sofa'] == distinct(dict(reversed(words.items())))
    assert not any(near_duplicate(a, b) for a in kept for b in kept if a != b)
    for gone in set(words) - set(kept): assert any(near_duplicate(gone, k) and words[k] >= words[gone] for k in kept)


def test_no_controlled_case_draws_a_word_that_was_cleaned_away(tmp_path):
    r = relations(*[(f'{i}.png', s, 'below', o) for i, (s, o) in enumerate(2*[('sofa', 'tree'), ('couch', 'dog'), ('sofa', 'lamp')])])
    a = attributes(*[(x, 'cat', y, 'dog') for x in ('red', 'gray', 'grey', 'grey') for y in ('blue', 'green')])
    drawn = {w for seed in range(8) for c in cases(tmp_path, r, a, seed).choices for w in set(c.texts[1].split()) - set(c.texts[0].split())}
    assert {'sofa', 'grey'} <= drawn and not {'couch', 'gray'} & drawn
    assert cases(tmp_path, r, a).skipped['near-duplicate object words'] == 1


def test_controlled_cases_differ_in_one_element(tmp_path):
    things, words = ('man', 'horse', 'sofa', 'couch', 'tree'), ('riding', 'above', 'on top of', 'below', 'to the left of')
    r = relations(*[('1.png', s, w, o) for s in things for w in words for o in things if s != o])
    a = attributes(*[(x, 'cat', y, 'dog') for x in ('red', 'gray', 'grey') for y in ('blue', 'green')])
    b = cases(tmp_path, [{**x, 'image_path': f'{i}.png'} for i, x in enumerate(r)], a)
    assert len({c.id for c in b.choices}) == len(b.choices) == 2*len(r) + len(a)
    for c in b.choices:
        right, wrong = (t.split() for t in c.texts)
        while right[0] == wrong[0]: right.pop(0), wrong.pop(0)
        while right and wrong and right[-1] == wrong[-1]: right.pop(), wrong.pop()
        assert not too_close(' '.join(right), ' '.join(wrong)), c
        if c.subset == 'object': assert c.texts[1].split()[1] != c.texts[1].split()[-1]  # nothing stands to itself


def test_controlled_cases_follow_the_seed_and_leave_true_captions_alone(tmp_path):
    r = relations(('1.png', 'man', 'below', 'tree'), ('1.png', 'man', 'below', 'bus'), ('2.png', 'man', 'below', 'lamp'))
    a = attributes(('red', 'cat', 'blue', 'dog'), ('green', 'cat', 'black', 'dog'), ('white', 'cat', 'pink', 'dog'))
    b = cases(tmp_path, r, a)
    assert next(c for c in b.choices if c.id == 'object-0').texts[1] == 'the man is below the lamp'  # the bus is true of the picture
    assert b.choices == cases(tmp_path, r, a).choices
    assert any(cases(tmp_path, r, a, seed).choices != b.choices for seed in (1, 2, 3))


def test_controlled_cases_left_out_are_counted(tmp_path):
    r = relations(('1.png', 'man', 'below', 'tree'), ('2.png', 'cat', 'below', 'dog'))
    r += relations(('1.png', 'a', 'on', 'b'), true_caption='a on b')
    b = cases(tmp_path, r, attributes(('red', 'cat', 'blue', 'dog'), ('green', 'cat', 'blue', 'dog')))
    cleaned = {f'near-duplicate {k} words': 0 for k in ('object', 'attribute', 'relation')}
    assert b.skipped == {'another template': 1, 'no replacement': 2, **cleaned}  # "below" is the only relation
    assert {c.subset for c in b.choices} == {'object', 'attribute'}
    assert b.expected == {'object': 23937, 'attribute': 28748, 'relation': 13595}


def test_retrieval_keeps_every_caption(tmp_path):
    sentences = [{'raw': t, 'tokens': [], 'sentid': i} for i, t in enumerate(('a cat', 'a red cat', ' '))]
    image = {'filepath': 'val', 'filename': '1.png', 'split': 'test', 'sentences': sentences}
    write_json(tmp_path/'k.json', {'images': [image, {**image, 'filename': '2.png', 'split': 'val', 'sentences': []}]})
    b = retrieval(tmp_path/'k.json', 'test', tmp_path)
    assert [c.texts for c in b.choices] == [('a cat', 'a red cat')] and b.expected == {'i2t': 1, 't2i': 2}
    assert b.skipped == {'empty caption': 1}


def test_by_name(tmp_path):
    write_json(tmp_path/'r.json', [ITEM])
    assert read_benchmark('vg_relation', vg_relation=tmp_path/'r.json', vg_images=tmp_path, split='test').name == 'vg_relation'
    message = f'winogrande: unknown benchmark; expected one of {", ".join(BENCHMARKS)}'
    with pytest.raises(CSClipError, match=message): read_benchmark('winogrande')
    with pytest.raises(CSClipError, match='controlled: needs vg_attribution, vg_images'): read_benchmark('controlled', vg_relation='r.json')


def test_the_digest_names_choices_and_packed_pictures(tmp_path):
    write_json(tmp_path/'r.json', [ITEM])
    for name, color in {'a': 'red', 'b': 'blue', 'c': 'red'}.items():
        with zipfile.ZipFile(tmp_path/f'{name}.zip', 'w') as z: z.writestr('1.png', png(color))
    a, b, c = (vg_relation(tmp_path/'r.json', tmp_path/f'{name}.zip').digest for name in 'abc')
    assert a == c != b


def test_the_digest_names_the_pictures_that_a_folder_holds(tmp_path):
    def digest(**files):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        for name, color in files.items():
            if name == 'loose': (folder/'1.png').write_bytes(png(color))
            else:
                with zipfile.ZipFile(folder/f'{name}.zip', 'w') as z: z.writestr(zipfile.ZipInfo('1.png'), png(color))
        write_json(tmp_path/'r.json', [{**ITEM, 'image_path': '1.png' if 'loose' in files else 'val/1.png'}])
        return vg_relation(tmp_path/'r.json', folder).digest
    assert digest(val='red') == digest(val='red') == digest(val='red', train='blue') != digest(val='blue')  # others' archives do not count
    assert digest(loose='red') == digest(loose='red') != digest(loose='blue')
    assert digest(val='red') != digest(train='red')  # the picture is not there


@pytest.mark.parametrize('counts, message', [([1], 'an object of counts'), ({'vg_relation': 'two'}, '"vg_relation" is "two"; expected a whole number')])
def test_expected_counts_of_another_type_are_refused(tmp_path, counts, message):
    write_json(tmp_path/'expected.json', counts)
    write_json(tmp_path/'r.json', [ITEM])
    with pytest.raises(CSClipError, match=f'expected.json: .*{message}'): vg_relation(tmp_path/'r.json', tmp_path)


# The formats of SugarCrepe++, GQA, Winoground, ColorSwap, VALSE, VL-CheckList, What'sUp, ImageFolders -----------------------------------

def test_two_items_with_one_id():
    choice = Choice('7', 'a', '1.png', ('a', 'b'))
    with pytest.raises(CSClipError, match='toy: item "7" comes twice'): Benchmark('toy', [choice, choice], Path('.'), {'a': 2})


PLUS = {**PAIR, 'id': 5, 'caption2': 'a blue dog next to a red cat'}


def test_sugar_crepe_pp(tmp_path):
    for k in SUGAR_CREPE_PP: write_json(tmp_path/f'{k}.json', [PLUS, {**PLUS, 'id': 9}])
    b = sugar_crepe_pp(tmp_path, tmp_path)
    assert sum(b.expected.values()) == 4757 and len(b.choices) == 10 and b.choices[1].id == 'replace_obj-9'
    assert {(c.right, len(c.texts)) for c in b.choices} == {(2, 3)} and b.choices[0].texts[2] == PAIR['negative_caption']
    write_json(tmp_path/'swap_att.json', [{k: v for k, v in PLUS.items() if k != 'caption2'}])
    with pytest.raises(CSClipError, match='swap_att.json: item 0: no key "caption2"'): sugar_crepe_pp(tmp_path, tmp_path)


TWO = {'id': 3, 'caption_0': 'a cat on a dog', 'caption_1': 'a dog on a cat', 'image_0': 'ex_3_img_0', 'image_1': 'ex_3_img_1', 'tag': 'Object'}


def test_winoground_and_colorswap(tmp_path):
    (tmp_path/'examples.jsonl').write_text('\n'.join(json.dumps({**TWO, 'id': i, 'collapsed_tag': 'Both'}) for i in (0, 4)) + '\n')
    b = winoground(tmp_path/'examples.jsonl', tmp_path)
    assert b.kind == 'paired' and b.expected == {'i2t': 400, 't2i': 400, 'group': 400} and [c.id for c in b.choices] == ['0', '4']
    assert (b.choices[0].image, *b.choices[0].others) == ('ex_3_img_0.png', 'ex_3_img_1.png') and b.choices[0].group == 'Both'
    row = {'id': 1, 'caption_1': 'a red cat', 'caption_2': 'a cat', 'image_1': 'images/1_1.png', 'image_2': 'images/1_2.png'}
    write_json(tmp_path/'test.json', [row])
    b = colorswap(tmp_path/'test.json', tmp_path)
    assert (b.choices[0].image, *b.choices[0].others) == ('images/1_1.png', 'images/1_2.png') and b.expected['group'] == 1000


@pytest.mark.parametrize('text, message', [('{"caption_0": 1}', 'item 0: "caption_0" is 1; expected text'), ('{"x"', 'broken JSON at line 1'),
                                           ('', 'no items; expected a list'), ('7', 'no key "caption_1"')])
def test_winoground_refuses(tmp_path, text, message):
    (tmp_path/'examples.jsonl').write_text(text)
    with pytest.raises(CSClipError, match=f'examples.jsonl: .*{message}'): winoground(tmp_path/'examples.jsonl', tmp_path)


def test_valse_keeps_what_annotators_confirmed(tmp_path):
    item = {'dataset': 'SWiG', 'image_file': 'a.jpg', 'caption': 'a man exercises', 'foil': 'a torso exercises', 'mturk': {'caption': 2, 'foil': 1}}
    for k in VALSE: write_json(tmp_path/f'{k}.json', {'a_0': item, 'a_9': {**item, 'mturk': {'caption': 1, 'foil': 0}}})
    b = valse(tmp_path, tmp_path)
    assert len(b.choices) == 11 and b.choices[0].image == 'a.jpg' and b.choices[0].texts == (item['caption'], item['foil'])
    assert b.skipped == {'fewer than two annotators for the caption': 11} and b.lacking == 8782 - 22
    (tmp_path/'SWiG').mkdir()
    assert valse(tmp_path, tmp_path).choices[0].image == 'SWiG/a.jpg'
    write_json(tmp_path/'plurals.json', {'a_0': {**item, 'mturk': {}}})
    with pytest.raises(CSClipError, match='plurals.json: item "a_0", "mturk": no key "caption"'): valse(tmp_path, tmp_path)


def test_vl_checklist_by_source_and_type(tmp_path):
    write_json(tmp_path/'Attribute/vaw/color.json', [['VG_100K/2.jpg', {'POS': ['white plate', 'pale plate'], 'NEG': ['black plate']}]])
    write_json(tmp_path/'Object/Location/swig_location/swig_agent/swig_agent_mid.json', [['a_1.jpg', {'POS': ['a man'], 'NEG': ['a dog', 'a cat']}]])
    two = {'POS': ['man holds cup', 'man lifts cup'], 'NEG': ['man drops cup', 'man fills cup']}
    write_json(tmp_path/'Relation/hake_action.json', [['pic/1.jpg', two]])
    b = vl_checklist(tmp_path, tmp_path)
    assert b.expected == {'Attribute/vaw/color': 2, 'Object/Location/swig_location/swig_agent/swig_agent_mid': 1, 'Relation/hake_action': 2}
    assert [c.texts for c in b.choices] == [('white plate', 'black plate'), ('pale plate', 'black plate'), ('a man', 'a dog', 'a cat'),
                                            ('man holds cup', 'man drops cup'), ('man lifts cup', 'man fills cup')]
    assert [c.image for c in b.choices[1:4]] == ['vg/VG_100K/2.jpg', 'swig/a_1.jpg', 'hake/pic/1.jpg']
    for bad, message in ((['a.jpg'], r'expected \[picture, texts\]'), (['a.jpg', {'POS': [], 'NEG': ['x']}], 'is empty'),
                         (['a.jpg', {'NEG': []}], 'no key "POS"')):
        write_json(tmp_path/'Attribute/vaw/color.json', [bad])
        with pytest.raises(CSClipError, match=f'color.json: item 0: .*{message}'): vl_checklist(tmp_path, tmp_path)


def test_whatsup(tmp_path):
    item = {'image_path': 'data/controlled_images/a.jpeg', 'caption_options': ['on', 'under', 'left', 'right']}
    for k in WHATSUP: write_json(tmp_path/f'{k}_dataset.json', [item])
    b = whatsup(tmp_path, tmp_path)
    assert b.expected == {'controlled_images': 412, 'controlled_clevr': 408} and b.choices[0].image == 'controlled_images/a.jpeg'
    write_json(tmp_path/'controlled_clevr_dataset.json', [{**item, 'caption_options': ['on']}])
    with pytest.raises(CSClipError, match='item 0: "caption_options" holds 1'): whatsup(tmp_path, tmp_path)


def test_spatial_photographs(tmp_path):
    for k in ('coco_qa_one_obj', 'coco_qa_two_obj', 'vg_qa_one_obj', 'vg_qa_two_obj'):
        write_json(tmp_path/f'{k}.json', [[139, 'a dog on the left', 'a dog on the right'], ['7', 'a dog on top', 'a dog below']])
    coco, vg = coco_spatial(tmp_path, tmp_path), gqa_spatial(tmp_path, tmp_path)
    assert [c.image for c in coco.choices] == ['000000000139.jpg', '000000000007.jpg']*2 and vg.choices[0].image == '139.jpg'
    assert coco.expected == {'coco_qa_one_obj': 2247, 'coco_qa_two_obj': 440} and sum(vg.expected.values()) == 1451
    assert coco.choices[2].texts == ('a dog on the left', 'a dog on the right')
    for bad, message in ([139, 'a', ''], 'expected .picture'), ([139, 'a'], 'expected .picture'), ({'image': 1}, 'expected .picture'), (['x', 'a', 'b'], 'its number'):
        write_json(tmp_path/'vg_qa_two_obj.json', [bad])
        with pytest.raises(CSClipError, match=f'vg_qa_two_obj.json: item 0: .*{message}'): gqa_spatial(tmp_path, tmp_path)


def image_folder(folder, **classes):
    for name, pictures in classes.items():
        (folder/name).mkdir(parents=True)
        for k in range(pictures): (folder/name/f'{k}.png').write_bytes(png('red'))
    return folder


def test_zero_shot_folder(tmp_path):
    folder = image_folder(tmp_path/'f', cat=2, n02=1)
    (folder/'templates.txt').write_text('a {}.\n\nan icon of a {c}.\n')
    write_json(folder/'classes.json', {'n02': 'tench, fish', 'cat': 'cat'})
    b = zero_shot(folder)
    assert [(c.image, c.group) for c in b.choices] == [('cat/0.png', 'cat'), ('cat/1.png', 'cat'), ('n02/0.png', 'n02')]
    assert b.choices[2].texts == ('a tench, fish.', 'an icon of a tench, fish.') and b.expected == {'zero_shot': 3}
    write_json(folder/'classes.json', {'cat': 'cat'})
    with pytest.raises(CSClipError, match='classes.json: no key "n02"'): zero_shot(folder)
    (folder/'classes.json').unlink()
    (folder/'templates.txt').write_text('a cat\n')
    with pytest.raises(CSClipError, match='templates.txt: "a cat" has no'): zero_shot(folder)
    (folder/'templates.txt').unlink()
    with pytest.raises(CSClipError, match='f/dog: no picture of this class'): zero_shot(image_folder(folder, dog=0))
    with pytest.raises(CSClipError, match='gone: no such folder'): zero_shot(tmp_path/'gone')


OBJECTS = {'1': ('boy', ['young']), '2': ('cat', ['black', 'small']), '3': ('sky', ['blue']), '4': ('cats', []), '5': ('boy', ['tall', 'green'])}
LOOKS = {'imageId': '7', 'question': 'The boy is looking at what animal?', 'answer': 'cat', 'fullAnswer': 'The boy is looking at the cat.',
         'annotations': {'question': {'1': '1'}, 'answer': {'0': '2'}, 'fullAnswer': {'1': '1', '6': '2'}}}


def questions(folder, *items, objects=OBJECTS, **kw):
    write_json(folder/'q.json', {str(i): item for i, item in enumerate(items)})
    write_json(folder/'s.json', {'7': {'objects': {k: {'name': n, 'attributes': a, 'relations': []} for k, (n, a) in objects.items()}}})
    return gqa(folder/'q.json', folder/'s.json', folder, **kw)


def test_gqa_by_the_papers_rules(tmp_path):
    color = {**LOOKS, 'question': 'What color is the cat?', 'answer': 'black', 'fullAnswer': 'The cat is black.'}
    b = questions(tmp_path, LOOKS, color, {**LOOKS, 'answer': 'yes'}, {**LOOKS, 'imageId': '8'}, {**LOOKS, 'fullAnswer': 'It is a feline.'})
    texts = {c.id: c.texts for c in b.choices}
    assert texts['0'] == tuple(f'{LOOKS["question"]} The boy is looking at the {x}.' for x in ('cat', 'sky'))  # "cats" is too like it, "boy" is said
    assert texts['1'][1] in [f'What color is the cat? The cat is {c}.' for c in ('blue', 'tall', 'green')]  # not small: the cat is
    assert b.choices[0].image == '7.jpg' and b.expected == {'gqa': 10_000}
    assert b.skipped == {'yes or no': 1, 'no scene graph': 1, 'answer not in the full answer': 1}
    assert questions(tmp_path, LOOKS, objects={k: v for k, v in OBJECTS.items() if k != '3'}).skipped == {'no replacement': 1}


def test_gqa_follows_the_seed_and_stops_at_n(tmp_path):
    items = [{**LOOKS, 'question': f'Number {i}?', 'annotations': {}} for i in range(40)]
    objects = {str(i): (w, []) for i, w in enumerate(('cat', 'sky', 'tree', 'house', 'bus'))}
    a, again, other = (questions(tmp_path, *items, objects=objects, n=10, seed=s).choices for s in (0, 0, 1))
    assert a == again != other and len(a) == 10 and {c.id for c in a} != {c.id for c in other}


@pytest.mark.parametrize('change, message', [({'answer': None}, 'q.json: question "0": "answer" is null'), ({'question': ''}, '"question" is blank')])
def test_gqa_refuses(tmp_path, change, message):
    with pytest.raises(CSClipError, match=message): questions(tmp_path, {**LOOKS, **change})


def test_gqa_without_scene_graphs(tmp_path):
    write_json(tmp_path/'q.json', {'0': LOOKS})
    for graphs, message in (({}, 's.json: no items'), ({'7': {}}, 's.json: image "7": no key "objects"'),
                            ({'7': {'objects': {'1': {'name': 'cat'}}}}, 'image "7", object "1": no key "attributes"')):
        write_json(tmp_path/'s.json', graphs)
        with pytest.raises(CSClipError, match=message): gqa(tmp_path/'q.json', tmp_path/'s.json', tmp_path)


def test_flickr_has_no_folders_and_a_published_count(tmp_path):
    image = {'filename': '1.jpg', 'split': 'test', 'sentences': [{'raw': 'a cat', 'tokens': ['a', 'cat'], 'sentid': 0}]}
    write_json(tmp_path/'dataset_flickr30k.json', {'dataset': 'flickr30k', 'images': [image]})
    b = read_benchmark('retrieval_flickr', flickr=tmp_path/'dataset_flickr30k.json', split='test', flickr_images=tmp_path)
    assert b.name == 'retrieval_flickr' and b.choices[0].image == '1.jpg' and b.expected == {'i2t': 1000, 't2i': 1}


def test_the_digest_names_second_pictures_and_how_many_texts_are_right(tmp_path):
    a = Choice('0', 'a', '1.png', ('x', 'y'))
    digests = {Benchmark('toy', [c], tmp_path, {'a': 1}).digest for c in (a, a._replace(right=2), a._replace(others=('2.png',)))}
    assert len(digests) == 3


# What IconWorld writes in these formats ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def more(tmp_path_factory):
    folder = tmp_path_factory.mktemp('more')
    return folder, iw.write_benchmarks(folder, pictures=400, items=8, questions=120, per_class=1, paired=40)


def test_readers_find_all_that_icon_world_writes(more, tmp_path):
    folder, expected = more
    plus, classes = sugar_crepe_pp(folder/'scpp/data', folder), zero_shot(folder/'zero_shot/test')
    questions = gqa(folder/'gqa/val_balanced_questions.json', folder/'gqa/val_sceneGraphs.json', folder)
    assert plus.expected == expected['sugar_crepe_pp'] and len(plus.choices) == 40
    assert questions.expected == {'gqa': expected['gqa']} and len(questions.choices) == expected['gqa'] == 120
    assert set(questions.skipped) == {'yes or no'}
    assert classes.expected == {'zero_shot': len(iw.NOUN)} and len(classes.choices) == len(iw.NOUN)
    pairs = winoground(folder/'winoground/examples.jsonl', folder/'winoground/images.zip')
    assert pairs.expected == dict.fromkeys(('i2t', 't2i', 'group'), 40) and len(pairs.choices) == 40
    assert all(name in ImageStore(pairs.images) for c in pairs.choices for name in (c.image, *c.others))
    iw.write_benchmarks(tmp_path, pictures=400, items=8, questions=120, per_class=1, paired=40)
    for path in folder.rglob('*.*'): assert path.read_bytes() == (tmp_path/path.relative_to(folder)).read_bytes(), path


def test_icon_worlds_sugar_crepe_pp_says_sugar_crepes_captions_again(more):
    for kind in SUGAR_CREPE_PP:
        choices = [c for c in sugar_crepe_pp(more[0]/'scpp/data', more[0]).choices if c.subset == kind]
        for (index, _, _, caption, negative), c in zip(iw.sugar_crepe_items(0, 400, kind, 8), choices, strict=True):
            assert (c.image, c.texts[0], c.texts[2]) == (iw.picture_name('test', index), caption, negative)
            assert len({t.lower().rstrip('.') for t in c.texts}) == 3


def statement(answer):
    "What an answer of IconWorld's GQA claims."
    if m := re.fullmatch(r'The (\w+) is (\w+)\.', answer): return iw.Statement((iw.Mention(m[1], m[2]),))
    a, said, b = re.fullmatch(r'The (\w+) is (.+) the (\w+)\.', answer).groups()
    return iw.Statement((iw.Mention(a), iw.Mention(b)), next(r for r, words in iw.RELATIONS.items() if words[0] == said))


def test_icon_worlds_gqa_replacements_are_false(more):
    kinds = set()
    for seed in range(3):
        for c in gqa(more[0]/'gqa/val_balanced_questions.json', more[0]/'gqa/val_sceneGraphs.json', more[0], seed=seed).choices:
            scene = iw.scene_at(0, 'test', int(c.image[:12]) - 2_000_001)
            right, wrong = (statement(t.split('? ')[1]) for t in c.texts)
            assert iw.holds(scene, right) and not iw.holds(scene, wrong, loose=True), c
            kinds.add(right.relation)
    assert {'', 'above', 'below'} <= kinds


def test_each_of_icon_worlds_paired_captions_is_true_of_its_own_picture_alone(more):
    found = iw.paired_items(0, 40)
    asked = winoground(more[0]/'winoground/examples.jsonl', more[0]/'winoground/images.zip')
    for (tag, scenes, texts), c in zip(found, asked.choices, strict=True):
        assert c.texts == texts and c.group == tag and same_bag(*texts) and texts[0] != texts[1]
        changed = [(a, b) for a, b in zip(scenes[0].things, scenes[1].things) if a != b]
        assert len(changed) == 2 and scenes[0].background == scenes[1].background and scenes[0].actions == scenes[1].actions
        if tag == 'swap_att': assert [a.colour for a, _ in changed] == [b.colour for _, b in changed][::-1] and all(a.box == b.box for a, b in changed)
        else: assert all(a.noun == b.noun and a.colour == b.colour and a.box != b.box for a, b in changed)
        for scene, name in zip(scenes, (c.image, *c.others)):
            assert all(0 <= t.box[0] < t.box[2] <= iw.PIXELS and 0 <= t.box[1] < t.box[3] <= iw.PIXELS for t in scene.things)
            assert ImageStore(asked.images).open(name).size == (iw.PIXELS, iw.PIXELS)
    assert {c.group for c in asked.choices} == set(iw.EXCHANGED)

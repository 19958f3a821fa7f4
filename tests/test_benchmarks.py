"Readers of benchmark files: what they accept, what they refuse by name, what is a fair controlled case."
import json, tempfile, zipfile
from pathlib import Path
import pytest
from cs_clip.benchmarks import (
    BENCHMARKS, SUGAR_CREPE, controlled, crop, read_benchmark, retrieval, sugar_crepe, too_close, vg_attribution, vg_relation)
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
    assert b.skipped == {'another template': 1, 'no replacement': 2}  # "below" is the only relation
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
    message = f'winoground: unknown benchmark; expected one of {", ".join(BENCHMARKS)}'
    with pytest.raises(CSClipError, match=message): read_benchmark('winoground')
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

"Concepts of captions, as graphs written by hand and by the parser give them."
import pytest
from cs_clip.concepts import RULES, concepts, concepts_file
from cs_clip.files import CSClipError
from cs_clip.parsing import Attribute, Object, SceneGraph, SceneGraphParser, Span, parse_file
from cs_clip.units import entities


def graph(caption, *phrases):
    "A graph whose objects are the given phrases, in order; the head is each one's last word."
    objects, at = [], 0
    for phrase in phrases:
        start = caption.index(phrase, at)
        at, head = start + len(phrase), phrase.split()[-1]
        objects.append(Object(head, at - len(head), at, Span(phrase, start, at), 'singular'))
    return SceneGraph(caption, tuple(objects))


@pytest.mark.parametrize('phrase, expected', [
    ('the red mug', 'red mug'), ('An apple', 'apple'), ('all the dogs', 'dogs'), ('two big dogs', 'two big dogs'), ('his dog', 'dog'),
    ('theatre', 'theatre'), ('another man', 'man'), ('no dog', 'dog'), ('Red  Mug', 'red mug'), ('the', 'the')])
def test_determiners_go_and_attributes_stay(phrase, expected):
    assert concepts(graph(f'{phrase} here', phrase)) == (expected,)


def test_duplicates_order_and_none():
    caption = 'The red mug by a mug and a red mug'
    g = graph(caption, 'The red mug', 'a mug', 'a red mug')
    assert concepts(g) == ('red mug', 'mug')
    assert concepts(g, 'noun') == ('mug',)
    assert concepts(g, 'chunk') == ('the red mug', 'a mug', 'a red mug')
    assert concepts(graph('Nobody there')) == ('Nobody there',)
    with pytest.raises(CSClipError, match='phrase, noun, chunk'): concepts(g, 'nouns')


def test_concepts_are_words_of_the_caption_once_each():
    captions = ['Two black dogs and a cat sleep on the sofa', 'A man in a red hat holds his red hat', 'THE END', '', 'a ' * 20, '🙂 🙂']
    for g in SceneGraphParser().parse(captions):
        for rule in RULES:
            found = concepts(g, rule)
            assert len(set(found)) == len(found) > 0
            assert all(c.lower() in ' '.join(g.caption.lower().split()) or c == g.caption for c in found)


def test_attributes_beside_the_phrase_are_not_invented():
    g = graph('The mug is red', 'The mug')
    g = SceneGraph(g.caption, g.objects, (Attribute('red', 11, 14, 0),))
    assert concepts(g) == ('mug',)


def test_units_keep_the_quantifier_that_concepts_drop():
    graph = next(iter(SceneGraphParser().parse(['there are some dogs under all the tables'])))
    assert concepts(graph) == ('dogs', 'tables')
    assert [e.text for e in entities(graph)[0]] == ['some dogs', 'all the tables']


def test_a_folder_of_something_else_leaves_earlier_work_alone(tmp_path):
    "Given concepts where graphs were expected, the good concepts in the folder that was to be written stay, whole and readable."
    parse_file([(1, '1.png', 'a red mug')], tmp_path/'graphs')
    concepts_file(tmp_path/'graphs', tmp_path/'concepts')
    before = {p.name: p.read_bytes() for p in (tmp_path/'concepts').iterdir()}
    concepts_file(tmp_path/'graphs', tmp_path/'others')
    with pytest.raises(CSClipError, match='no column .*expected what the parse stage writes'): concepts_file(tmp_path/'others', tmp_path/'concepts')
    assert {p.name: p.read_bytes() for p in (tmp_path/'concepts').iterdir()} == before

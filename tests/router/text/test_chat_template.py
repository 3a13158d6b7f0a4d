import pytest

from twostroke.protocol.errors import ConfigError, RequestError
from twostroke.router.text.chat_forms import ChatTemplate

USER = [{"role": "user", "content": "<hi> & é"}]


def render(source, messages=USER, **special):
    return ChatTemplate(source, origin="here", special_tokens=special).render(messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}", "<s><hi> & é"),
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<hi> & é"}'),
        ("{{ messages[0].content | tojson(indent=2) }}", '"<hi> & é"'),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% if tools %}tools{% endif %}{% generation %}x{% endgeneration %}", "x"),
        ("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ nothing_such }}", ""),
    ],
)
def test_it_renders_as_hugging_face_does(source, text):
    assert render(source, bos_token="<s>") == text


def test_transformers_renders_the_same():
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{%- if messages[0]['role'] == 'system' %}\n    {%- set system = messages[0]['content'] %}\n"
        "    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system = '' %}\n{%- endif %}\n"
        "{{- bos_token }}<<{{ system | trim }}>>\n{%- for message in messages %}\n"
        "    {{- '[' + message['role'] + ']\\n' + message['content'] | trim + eos_token }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '[assistant]\\n' }}\n{%- endif %}\n"
    )
    messages = [{"role": "system", "content": " be nice "}, *USER, {"role": "assistant", "content": "ok"}, *USER]
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs, _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, **special
    )
    assert render(source, messages, **special) == theirs[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 5 }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content | dictsort }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ range(10**9) | list }}",
        "{{ messages[0].content | no_such_filter_at_all_in_a_branch if false else undefined_thing.x.y }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_refuses_or_must_not_do_is_the_requests_error(source):
    try:
        template = ChatTemplate(source, origin="here", special_tokens={})
    except ConfigError:
        return  # some of these are found while compiling
    with pytest.raises(RequestError) as caught:
        template.render(USER)
    assert caught.value.param == "messages"


def test_a_template_without_end_is_cut_off():
    with pytest.raises(RequestError, match="too long"):
        render("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}")


def test_a_broken_template_names_its_origin():
    with pytest.raises(ConfigError, match=r"^here: chat_template is broken"):
        render("{% for %}")

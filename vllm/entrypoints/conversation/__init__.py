"""Bring conversations into a normal form, and render them with chat templates.

    messages of any API
      messages.read_messages     checked, and one form for everything that clients write differently
      rules.fit                  what this template reads: roles, ids, arguments, content, tools
      templates.Template.render  the text
    thinking                     the switches of thinking, under the names of all templates

Templates expect different forms of conversations, and do not declare which. So `Template` renders
small probes, once per template, and checks whether their texts appear in the result. Independent of
tokenizers, the engine and web frameworks; needs only jinja2.
"""

"""The normal form of a conversation, and the rendering of chat templates.

    messages of any API
      messages.read_messages     checked, and one form for everything that clients write differently
      rules.fit                  what this template reads: roles, ids, arguments, content, tools
      templates.Template.render  the text
    thinking                     the switches of thinking, under the names of all templates

Templates disagree about conversations, and they do not say what they read. So `Template` renders
small probes, once per template, and looks whether their texts appear. Knows no tokenizer, engine or
web framework; needs jinja2 only.
"""

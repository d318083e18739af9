"""The form on the home page that opens the planner in place."""

from __future__ import annotations

from html import escape

from shardwise.web.catalogue import catalogue

# As the planner's form names them.
MODEL, NODES, DEVICE = "llama-3-70b", 8, "H100-SXM"


def live_form() -> str:
    """Model, nodes and device; the script live.js opens the planner, without it a browser does."""
    known = catalogue()
    models = "".join(f'<option value="{escape(one["name"])}">' for one in known["models"])
    devices = "".join(
        f'<option value="{escape(one["name"])}"{" selected" * (one["name"] == DEVICE)}>'
        f"{escape(one['title'])}, {escape(one['memory'])}</option>"
        for one in known["devices"]
    )
    return (
        '<div class="planner"><form class="live" action="planner/" autocomplete="off">'
        f'<label>Model<input name="model" list="live-models" value="{MODEL}"></label>'
        f'<datalist id="live-models">{models}</datalist>'
        f'<label>Nodes of 8<input name="nodes" type="number" min="1" value="{NODES}"></label>'
        f'<label>Device<select name="device">{devices}</select></label>'
        '<button class="md-button md-button--primary">Plan it here</button></form>'
        '<p class="fine">The whole planner, in your browser: 12 MB once, and nothing you type '
        "leaves it, except the name of a model that is looked up on the hub.</p></div>"
    )

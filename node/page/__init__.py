"""The page of a node and of the cluster, drawn from FabricNodes.

The agent serves the page of its node, and the controller serves the page of all nodes. `html_page`
builds the whole HTML, so the page works without scripts. `feed` says when the page has changed.
`style.css` and `script.js` become part of the document.
"""

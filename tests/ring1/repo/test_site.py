"""The page of the routes of the site of the documentation; `ring2/repo/test_site.py` builds the site."""

from docs.site_hooks import http_routes


def test_a_route_is_told_whole() -> None:
    document = {
        "paths": {
            "/a/{b}": {
                "get": {
                    "tags": ["things"],
                    "summary": "Get a thing",
                    "parameters": [{"name": "b", "in": "path", "required": True, "schema": {"type": "string"}}],
                    "responses": {
                        "200": {"description": "It | that.", "content": {"application/json": {"schema": {"$ref": "#/x/Thing"}}}}
                    },
                }
            }
        },
        "components": {
            "schemas": {"Thing": {"properties": {"n": {"type": "array", "items": {"type": "integer"}}}, "required": ["n"]}}
        },
    }
    page = http_routes(document)
    assert "### `GET /a/{b}`" in page
    assert "| `b` | path | string | required |" in page
    assert "| 200 | `application/json` [Thing](#thing) | It \\| that. |" in page
    assert "| `n` | array of integer | required |" in page

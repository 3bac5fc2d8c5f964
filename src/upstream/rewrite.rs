//! Fitting a request to the upstream that it goes to: its path, and fields such as that provider's key.
//!
//! A backup provider seldom has the same paths and never the same credentials, so both belong to the
//! upstream and are applied to each attempt, after its target is decided. The query is passed on as it
//! is: what means the same to both sides is the path's shape, and a pattern that also had to survive the
//! order of query parameters would match by luck.

use std::borrow::Cow;

use http::HeaderMap;
use http::uri::PathAndQuery;

use crate::config::Rewrite;
use crate::error::Error;

/// The target that `rewrite` makes of `target`. Where the pattern does not match the path, byte for byte
/// the same. Where `to` brings a query of its own, the request's is appended. Where what comes out does not
/// begin with a slash, as a group may not, it gets one.
///
/// # Errors
/// [`Error::Internal`] when what comes out is no path: `to` is at fault, not the caller.
pub fn target(rewrite: &Rewrite, target: &PathAndQuery) -> Result<PathAndQuery, Error> {
    let Some((pattern, to)) = &rewrite.path else { return Ok(target.clone()) };
    let Cow::Owned(mut text) = pattern.replace_all(target.path(), to.as_str()) else {
        return Ok(target.clone());
    };
    if let Some(query) = target.query() {
        text.push(if text.contains('?') { '&' } else { '?' });
        text.push_str(query);
    }
    if !text.starts_with('/') {
        text.insert(0, '/');
    }
    PathAndQuery::from_maybe_shared(text.into_bytes())
        .map_err(|_| Error::Internal("rewrite.path.to made a path with characters that none may have".into()))
}

/// Takes away the fields of `headers.remove`, then sets those of `headers.set`, each replacing all of
/// its name.
pub fn fields(rewrite: &Rewrite, headers: &mut HeaderMap) {
    for name in &rewrite.remove {
        headers.remove(name);
    }
    for (name, value) in &rewrite.set {
        headers.insert(name.clone(), value.clone());
    }
}

#[cfg(test)]
mod tests {
    use http::header::{AUTHORIZATION, HeaderName, HeaderValue};

    use super::*;

    fn path_rewrite(from: &str, to: &str) -> Rewrite {
        Rewrite { path: Some((regex::Regex::new(from).unwrap(), to.into())), set: vec![], remove: vec![] }
    }

    fn rewritten(rewrite: &Rewrite, text: &str) -> Result<String, Error> {
        target(rewrite, &text.parse().unwrap()).map(|target| target.to_string())
    }

    #[test]
    fn groups_move_and_the_query_stays() {
        let rewrite = path_rewrite("^/v1/quote/(?<t>[^/]+)$", "/prices/${t}");
        assert_eq!(rewritten(&rewrite, "/v1/quote/AAPL?a=1&b=%20").as_deref(), Ok("/prices/AAPL?a=1&b=%20"));
        assert_eq!(rewritten(&rewrite, "/v1/quote/AAPL").as_deref(), Ok("/prices/AAPL"));
    }

    #[test]
    fn a_target_that_does_not_match_is_kept_byte_for_byte() {
        let rewrite = path_rewrite("^/v1/quote/(?<t>[^/]+)$", "/prices/${t}");
        for text in ["/v1/quote/a/b", "/V1/quote/x", "/%76%31/quote/x?q", "/other?/v1/quote/x", "/x?", "*"] {
            assert_eq!(rewritten(&rewrite, text).as_deref(), Ok(text));
        }
    }

    #[test]
    fn a_query_in_the_replacement_comes_before_the_callers() {
        let rewrite = path_rewrite("^/quote/(?<t>.+)$", "/q?symbol=${t}");
        assert_eq!(rewritten(&rewrite, "/quote/AAPL").as_deref(), Ok("/q?symbol=AAPL"));
        assert_eq!(rewritten(&rewrite, "/quote/AAPL?a=1").as_deref(), Ok("/q?symbol=AAPL&a=1"));
    }

    #[test]
    fn a_replacement_that_makes_no_path_is_an_error() {
        let answer = rewritten(&path_rewrite("^/x$", "/a b"), "/x");
        assert!(matches!(answer, Err(Error::Internal(_))), "{answer:?}");
    }

    /// Every call under `to: "$1"` once was an internal error.
    #[test]
    fn what_comes_out_without_a_slash_gets_one() {
        let rewrite = path_rewrite("^/v1/(.*)$", "$1");
        assert_eq!(rewritten(&rewrite, "/v1/x/y?q=1").as_deref(), Ok("/x/y?q=1"));
        assert_eq!(rewritten(&rewrite, "/v1/").as_deref(), Ok("/"));
        assert_eq!(rewritten(&rewrite, "/v1/?q").as_deref(), Ok("/?q"));
        let optional = path_rewrite("^/v1(/.*)?$", "$1");
        assert_eq!(rewritten(&optional, "/v1").as_deref(), Ok("/"));
        assert_eq!(rewritten(&optional, "/v1//x").as_deref(), Ok("//x"));
    }

    #[test]
    fn fields_are_removed_then_set() {
        let key = HeaderName::from_static("x-api-key");
        let rewrite = Rewrite {
            path: None,
            set: vec![(key.clone(), HeaderValue::from_static("backup"))],
            remove: vec![AUTHORIZATION, key.clone()],
        };
        let mut headers = HeaderMap::new();
        headers.append(AUTHORIZATION, HeaderValue::from_static("one"));
        headers.append(AUTHORIZATION, HeaderValue::from_static("two"));
        headers.append(&key, HeaderValue::from_static("a"));
        headers.append(&key, HeaderValue::from_static("b"));
        fields(&rewrite, &mut headers);
        assert_eq!(headers.len(), 1);
        assert_eq!(headers[&key], "backup");
    }
}

//! How requests are changed on their way to an upstream.

use super::Builder;
use crate::config::de::did_you_mean;
use crate::config::fields::{field_name, fields};
use crate::config::problem::Path;
use crate::config::{Rewrite, raw};

impl Builder<'_> {
    pub(super) fn rewrite(&self, keys: &raw::Rewrite, path: &Path) -> Rewrite {
        let headers = keys.headers.clone().unwrap_or_default();
        let remove_path = path.key("headers").key("remove");
        Rewrite {
            path: keys.path.as_ref().and_then(|keys| self.rewrite_path(keys, &path.key("path"))),
            set: fields(headers.set.as_ref(), &path.key("headers").key("set"), self.report, self.sources),
            remove: self.list(headers.remove.as_deref(), &remove_path, field_name),
        }
    }

    fn rewrite_path(&self, keys: &raw::RewritePath, path: &Path) -> Option<(regex::Regex, String)> {
        let (Some(from), Some(to)) = (&keys.from, &keys.to) else {
            self.report.error(path, "expected both `from` and `to`");
            return None;
        };
        for (key, text) in [("from", from), ("to", to)] {
            if text.len() > MOST_PATTERN {
                self.report.error(&path.key(key), format!("longer than {MOST_PATTERN} bytes"));
                return None;
            }
        }
        let regex = self.report.check(&path.key("from"), compile(from))?;
        for group in groups_of(to) {
            let is_known = match group.parse::<usize>() {
                Ok(number) => number < regex.captures_len(),
                Err(_) => regex.capture_names().flatten().any(|name| name == group),
            };
            if !is_known {
                let hint = match glued_number(group) {
                    Some((number, rest)) => format!("; did you mean `${{{number}}}{rest}`?"),
                    None => did_you_mean(group, regex.capture_names().flatten()),
                };
                self.report.error(&path.key("to"), format!("`from` has no group `{group}`{hint}"));
            }
        }
        let is_fine = self.report.check(&path.key("to"), judge_replacement(from, to)).is_some();
        if let Some(group) =
            first_group(to).filter(|group| is_fine && !begins_with_slash(from, &regex, group))
        {
            let message = format!("group `{group}` may begin without `/`; then one is put in front of it");
            self.report.warning(&path.key("to"), message);
        }
        Some((regex, to.clone()))
    }
}

/// Longest pattern and replacement; what is longer is a mistake, and all that is made of it grows with it.
const MOST_PATTERN: usize = 1024;
/// Of a compiled pattern. Matching takes time in proportion to the path alone, since the regex crate never
/// goes back; what a short pattern can blow up is its compiled form, and `(\w{1,900}){900}` stops here.
const MOST_COMPILED: usize = 1 << 20;

fn compile(from: &str) -> Result<regex::Regex, String> {
    let built =
        regex::RegexBuilder::new(from).size_limit(MOST_COMPILED).dfa_size_limit(MOST_COMPILED).build();
    built.map_err(|error| match error {
        regex::Error::Syntax(text) => {
            let reason = text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
            format!("expected a regular expression: {reason}")
        }
        _ => "the regular expression is too large; look for large counts such as `{1,900}`".to_owned(),
    })
}

/// What can be known before there is a path: that no path, or no whole one, comes out.
fn judge_replacement(from: &str, to: &str) -> Result<(), &'static str> {
    let literal = without_groups(to);
    if literal.contains('#') {
        return Err("a request has no `#fragment`; expected a path, and a query at most");
    }
    if format!("/{literal}").parse::<http::uri::PathAndQuery>().is_err() {
        return Err("no path has these characters; write them percent-encoded, a space as `%20`");
    }
    // An alternative may be anchored and the next one not.
    let is_at_start = from.starts_with('^') && !from.contains('|');
    let leaves_no_slash = match to.chars().next() {
        Some('/' | '$') => false,
        Some(_) => true,
        // What follows the match then begins the path; after `^/v1` it is the next segment's slash.
        None => from.ends_with('/') || from.ends_with('$'),
    };
    if is_at_start && leaves_no_slash {
        return Err("makes a path without a leading `/`");
    }
    Ok(())
}

/// The group that a replacement begins with.
fn first_group(to: &str) -> Option<&str> {
    let is_first = to.starts_with('$') && !to.starts_with("$$");
    groups_of(to).into_iter().next().filter(|_| is_first)
}

/// Whether a group's pattern begins with a slash, or is the whole match of one that does, or stands inside a path
/// anyway.
fn begins_with_slash(from: &str, regex: &regex::Regex, group: &str) -> bool {
    if !from.starts_with(['^', '/', '(']) {
        return true;
    }
    let number = group.parse().ok();
    let number = number.or_else(|| regex.capture_names().position(|name| name == Some(group)));
    match number {
        Some(0) => from.trim_start_matches('^').starts_with('/'),
        Some(number) => {
            patterns_of_groups(from).nth(number - 1).is_some_and(|pattern| pattern.starts_with('/'))
        }
        // That there is no such group has been told.
        None => true,
    }
}

/// What follows the bracket of each group that captures, in the order of their numbers.
fn patterns_of_groups(from: &str) -> impl Iterator<Item = &str> {
    let (mut is_escaped, mut is_in_class) = (false, false);
    from.char_indices().filter_map(move |(at, c)| {
        let is_plain = !std::mem::take(&mut is_escaped);
        match c {
            '\\' if is_plain => is_escaped = true,
            '[' if is_plain => is_in_class = true,
            ']' if is_plain => is_in_class = false,
            '(' if is_plain && !is_in_class => {
                let inner = &from[at + 1..];
                let named = inner.strip_prefix("?<").or_else(|| inner.strip_prefix("?P<"));
                return match named {
                    Some(named) => named.split_once('>').map(|(_, pattern)| pattern),
                    None => Some(inner).filter(|inner| !inner.starts_with('?')),
                };
            }
            _ => {}
        }
        None
    })
}

/// `1` and `x` of `$1x`, which means a group called `1x`.
fn glued_number(group: &str) -> Option<(&str, &str)> {
    let end = group.find(|c: char| !c.is_ascii_digit())?;
    (end > 0).then(|| group.split_at(end))
}

/// A replacement's own characters.
fn without_groups(replacement: &str) -> String {
    let mut own = replacement.replace("$$", "\0");
    for group in groups_of(replacement) {
        own = own.replace(&format!("${{{group}}}"), "").replace(&format!("${group}"), "");
    }
    own.replace('\0', "$")
}

/// The groups that a replacement uses, as the regex crate reads it: `$1`, `$name`, `${name}`.
fn groups_of(replacement: &str) -> Vec<&str> {
    let mut groups = Vec::new();
    let mut rest = replacement;
    while let Some((_, after)) = rest.split_once('$') {
        if let Some(after) = after.strip_prefix('$') {
            rest = after;
        } else if let Some((name, after)) = after.strip_prefix('{').and_then(|inner| inner.split_once('}')) {
            groups.push(name);
            rest = after;
        } else {
            let end = after.find(|c: char| c != '_' && !c.is_ascii_alphanumeric()).unwrap_or(after.len());
            groups.extend(Some(&after[..end]).filter(|name| !name.is_empty()));
            rest = &after[end..];
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replacement_that_can_only_make_an_invalid_path_is_told_and_no_other() {
        for (from, to) in [
            ("^/v1/(.*)$", "/v2/$1"),
            ("^/v1", ""),
            ("^(/v1)/x", "$1"),
            ("^/v1/(?<rest>.*)$", "${rest}"),
            ("v1", "v2"),
            ("^/a|b", "c"),
            ("^/q/(.*)$", "/q?symbol=$1&price=$$5"),
            ("^/x$", "/%20/*:@!,;='()~|"),
        ] {
            assert_eq!(judge_replacement(from, to), Ok(()), "{from} to {to}");
        }
        for (from, to) in [
            ("^/v1/(.*)$", "v2/$1"),
            ("^/v1/", ""),
            ("^/v1$", ""),
            ("x", "/a b"),
            ("x", "/a#b"),
            ("x", "/a\tb"),
            ("^/(.*)", "https://api.example/$1"),
        ] {
            assert!(judge_replacement(from, to).is_err(), "{from} to {to}");
        }
    }

    #[test]
    fn a_replacement_that_begins_with_a_group_is_told_where_that_need_not_be_a_path() {
        for (from, to, expected) in [
            ("^/v1/(.*)$", "$1", Some(false)),
            ("^/v1/(?<rest>.*)$", "${rest}", Some(false)),
            ("^/v1(/.*)?$", "$1", Some(true)),
            ("^/v1(?<rest>/.*)?$", "$rest", Some(true)),
            (r"^/[(]\((?:a)(b)(/c)", "$2", Some(true)),
            (r"^/[(]\((?:a)(b)(/c)", "$1", Some(false)),
            ("^/v1/x", "$0", Some(true)),
            ("(.*)", "/$1", None),
            ("(.*)", "$$1", None),
        ] {
            let regex = compile(from).unwrap();
            let begins = first_group(to).map(|group| begins_with_slash(from, &regex, group));
            assert_eq!(begins, expected, "{from} to {to}");
        }
    }

    #[test]
    fn a_replacement_s_own_characters_are_told_from_its_groups() {
        for (replacement, expected) in [
            ("/$1/x", "//x"),
            ("/${a b}c", "/c"),
            ("$$1", "$1"),
            ("/$10$1", "/"),
            ("/$", "/$"),
            ("/${", "/${"),
        ] {
            assert_eq!(without_groups(replacement), expected, "{replacement}");
        }
    }
}

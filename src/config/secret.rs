//! What must not be seen: private keys, and what looks like a secret where it does not belong.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use http::HeaderName;

use crate::wire::credentials::is_credential;

/// What stands for a secret wherever one would be shown.
pub(super) const MASK: &str = "[secret]";

/// The content of a secret file. Its Debug is a mask, so that no log of a policy gives it away.
#[derive(Clone, PartialEq, Eq)]
pub struct SecretBytes(Arc<[u8]>);

impl SecretBytes {
    /// These bytes, from now on hidden.
    pub fn new(bytes: Arc<[u8]>) -> Self {
        Self(bytes)
    }

    /// For whoever has a use for the secret itself.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for SecretBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

/// Whether a key is called as credentials are.
pub(super) fn sounds_secret(key: &str) -> bool {
    key.parse::<HeaderName>().is_ok_and(|name| is_credential(&name))
}

/// Whether a text has a name and a password in front of a host, as in `https://user:pass@host`.
pub(super) fn has_userinfo(text: &str) -> bool {
    text.split_once('@').is_some_and(|(before, _)| before.contains(':'))
}

/// The text with what may be a name and a password masked.
pub(super) fn without_userinfo(text: &str) -> Cow<'_, str> {
    match text.rsplit_once('@') {
        Some((before, host)) if has_userinfo(text) => {
            let scheme = before.split_once("://").map(|(scheme, _)| format!("{scheme}://"));
            format!("{}{MASK}@{host}", scheme.unwrap_or_default()).into()
        }
        _ => text.into(),
    }
}

/// Whether a text is the name of a file rather than a key that was written in its place. Base64 has no dots and
/// begins, as keys do in it, with a letter.
pub(super) fn is_file_name(text: &str) -> bool {
    const LONGEST: usize = 255;
    let is_name = text.starts_with('/') || text.contains('.') || text.len() < 16;
    is_name && text.len() <= LONGEST && !text.contains(char::is_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_passwords_in_front_of_a_host_are_masked() {
        for (text, expected) in [
            ("https://user:pass@a.example/x", "https://[secret]@a.example/x"),
            ("https://token@a.example", "https://[secret]@a.example"),
            ("https://u:p@ss@a.example", "https://[secret]@a.example"),
            ("user:pass@a.example", "[secret]@a.example"),
            ("https://a.example:80", "https://a.example:80"),
            ("me@a.example", "me@a.example"),
        ] {
            assert_eq!(without_userinfo(text), expected);
        }
    }

    #[test]
    fn a_key_is_told_from_the_name_of_its_file() {
        for name in ["key.pem", "tls/key.pem", "/run/secrets/key", "../k", "key"] {
            assert!(is_file_name(name), "{name}");
        }
        for key in
            ["MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7", "MC4CAQAwBQYDK2VwBCIEIDmXqxHJ", "a b.c"]
        {
            assert!(!is_file_name(key), "{key}");
        }
    }
}

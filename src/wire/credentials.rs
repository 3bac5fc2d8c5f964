//! The fields by which callers say who they are.
//!
//! Beside the two of the standards each provider has made up its own, so the names are not a list but what
//! such names are made of. To take a field for a credential that is none costs a shared answer; to miss one
//! would show a caller what is another's.

use http::header::{self, HeaderName};

/// What the names of such fields contain.
const WORDS: [&str; 13] = [
    "auth",
    "key",
    "token",
    "secret",
    "session",
    "cookie",
    "jwt",
    "credential",
    "passw",
    "signature",
    "tenant",
    "account",
    "organization",
];

/// Fields that contain such a word and say nothing to the upstream of who asks.
const OTHERS: [HeaderName; 4] = [
    header::PROXY_AUTHORIZATION,
    header::SEC_WEBSOCKET_KEY,
    HeaderName::from_static("idempotency-key"),
    HeaderName::from_static("x-idempotency-key"),
];

/// What nearly every request has: told apart by number, without a look at their letters.
const ORDINARY: [HeaderName; 12] = [
    header::HOST,
    header::ACCEPT,
    header::USER_AGENT,
    header::ACCEPT_ENCODING,
    header::CONNECTION,
    header::CONTENT_TYPE,
    header::CONTENT_LENGTH,
    header::ACCEPT_LANGUAGE,
    header::CACHE_CONTROL,
    header::IF_NONE_MATCH,
    header::RANGE,
    header::VIA,
];

/// Whether a field says who asks.
pub fn is_credential(name: &HeaderName) -> bool {
    if *name == header::AUTHORIZATION || *name == header::COOKIE {
        return true;
    }
    if ORDINARY.contains(name) {
        return false;
    }
    let text = name.as_str();
    WORDS.iter().any(|word| text.contains(word)) && !OTHERS.contains(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_providers_call_their_credentials_is_known() {
        for name in [
            "authorization",
            "cookie",
            "x-api-key",
            "api-key",
            "x-rapidapi-key",
            "ocp-apim-subscription-key",
            "x-goog-api-key",
            "x-goog-iap-jwt-assertion",
            "x-auth-token",
            "x-amz-security-token",
            "private-token",
            "x-cmc_pro_api_key",
            "x-finnhub-token",
            "x-vault-token",
            "dd-api-key",
            "openai-organization",
            "xi-api-key",
            "apikey",
        ] {
            assert!(is_credential(&HeaderName::from_static(name)), "{name}");
        }
    }

    #[test]
    fn ordinary_fields_are_none() {
        for name in
            ["accept", "user-agent", "host", "idempotency-key", "content-type", "traceparent", "x-request-id"]
        {
            assert!(!is_credential(&HeaderName::from_static(name)), "{name}");
        }
    }
}

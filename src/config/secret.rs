//! Bytes that must not be seen: private keys.

use std::fmt;
use std::sync::Arc;

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

//! A private key that signs certificates or serves TLS. It never leaves memory.
//!
//! rustls reads it and signs with it, rcgen only says what to sign: rcgen on ring reads no SEC1 and no
//! PKCS#1, which is what `openssl ecparam -genkey` and `openssl genrsa -traditional` write.

use std::sync::Arc;

use rcgen::{PublicKeyData, SignatureAlgorithm, SubjectPublicKeyInfo};
use rustls::SignatureScheme;
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::PrivateKeyDer;
use rustls::sign::SigningKey;

use crate::error::{Cause, Error};

/// Has no `Debug`, so that nothing prints it.
pub(super) struct Key {
    signer: Arc<dyn SigningKey>,
    public: SubjectPublicKeyInfo,
}

impl Key {
    /// A new key on P-256, which every client knows and which signs fastest.
    pub(super) fn generate() -> Result<Self, Error> {
        let pair = rcgen::KeyPair::generate().map_err(|error| Error::Internal(Cause::chain(&error)))?;
        Self::from_der(&PrivateKeyDer::Pkcs8(pair.serialize_der().into()))
    }

    /// Reads an ECDSA key on P-256 or P-384, an Ed25519 one or an RSA one.
    pub(super) fn from_der(der: &PrivateKeyDer<'_>) -> Result<Self, Error> {
        let signer = any_supported_type(der).map_err(|error| Error::Internal(Cause::chain(&error)))?;
        let public =
            signer.public_key().ok_or_else(|| Error::Internal("a key without a public half".into()))?;
        let public =
            SubjectPublicKeyInfo::from_der(&public).map_err(|error| Error::Internal(Cause::chain(&error)))?;
        Ok(Self { signer, public })
    }

    /// What rustls serves with.
    pub(super) fn signer(&self) -> Arc<dyn SigningKey> {
        self.signer.clone()
    }
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        self.public.der_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.public.algorithm()
    }
}

impl rcgen::SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signer =
            self.signer.choose_scheme(&SCHEMES).ok_or(rcgen::Error::UnsupportedSignatureAlgorithm)?;
        signer.sign(message).map_err(|_| rcgen::Error::RemoteKeyError)
    }
}

/// One for each kind of key, and the one that `algorithm` names for it.
const SCHEMES: [SignatureScheme; 4] = [
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::ED25519,
    SignatureScheme::RSA_PKCS1_SHA256,
];

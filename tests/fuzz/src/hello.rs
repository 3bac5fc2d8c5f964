//! Which host a ClientHello names.

use hedgerow::tls::hello::HelloReader;

use crate::Target;

/// A hello says the same in whatever pieces it comes, and the name that it gives is in lower case.
pub const HELLO: Target = Target {
    check,
    inputs: 20_000,
    seeds: &[
        // Whole, and in two records.
        "\u{16}\u{3}\u{1}\u{0}j\u{1}\u{0}\u{0}f\u{3}\u{3}rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrr\u{0}\u{0}\u{2}\u{13}\u{1}\u{1}\u{0}\u{0};\u{0}\u{0}\u{0}\u{e}\u{0}\u{c}\u{0}\u{0}\u{9}A.example\u{0}+\u{0}\u{3}\u{2}\u{3}\u{4}\u{0}\u{d}\u{0}\u{4}\u{0}\u{2}\u{4}\u{3}\u{0}\u{a}\u{0}\u{4}\u{0}\u{2}\u{0}\u{1d}\u{0}\u{10}\u{0}\u{e}\u{0}\u{c}\u{2}h2\u{8}http/1.1",
        "\u{16}\u{3}\u{1}\u{0} \u{1}\u{0}\u{0}f\u{3}\u{3}rrrrrrrrrrrrrrrrrrrrrrrrrr\u{16}\u{3}\u{1}\u{0}Jrrrrrr\u{0}\u{0}\u{2}\u{13}\u{1}\u{1}\u{0}\u{0};\u{0}\u{0}\u{0}\u{e}\u{0}\u{c}\u{0}\u{0}\u{9}A.example\u{0}+\u{0}\u{3}\u{2}\u{3}\u{4}\u{0}\u{d}\u{0}\u{4}\u{0}\u{2}\u{4}\u{3}\u{0}\u{a}\u{0}\u{4}\u{0}\u{2}\u{0}\u{1d}\u{0}\u{10}\u{0}\u{e}\u{0}\u{c}\u{2}h2\u{8}http/1.1",
        "\u{16}\u{3}\u{1}\u{0}\u{5}hello",
        "GET / HTTP/1.1\r\n",
    ],
};

fn check(data: &[u8]) {
    let whole = look(data, data.len().max(1));
    assert_eq!(look(data, 1), whole, "byte by byte");
    assert_eq!(look(data, 7), whole, "in sevens");
    if HELLO.seeds[..2].iter().any(|seed| seed.as_bytes() == data) {
        assert_eq!(whole, Ok(Some(Some("a.example".to_owned()))), "the seeds are hellos");
    }
    if let Ok(Some(Some(name))) = whole {
        assert_eq!(name, name.to_ascii_lowercase());
    }
}

/// What is made of bytes that come in such pieces; that it is no hello is all that is compared of an error.
fn look(data: &[u8], piece: usize) -> Result<Option<Option<String>>, ()> {
    let mut reader = HelloReader::default();
    let ends = (piece..data.len()).step_by(piece).chain([data.len()]);
    for end in ends {
        match reader.look(&data[..end]) {
            Ok(None) => {}
            told => return told.map_err(drop),
        }
    }
    Ok(None)
}

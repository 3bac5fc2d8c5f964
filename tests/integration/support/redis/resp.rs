//! The language of Redis (RESP2), as far as a test asks questions in it.
//!
//! By hand and apart from the crate that hedgerow speaks it with: a test must not believe what it checks.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// A server that says nothing for so long is taken for mute.
const SILENCE: Duration = Duration::from_secs(5);

/// What a server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// There is no such thing.
    Nil,
    /// A status or a value.
    Text(Vec<u8>),
    /// A count, or yes and no.
    Integer(i64),
    /// Several of them.
    List(Vec<Self>),
    /// A refusal, such as `READONLY You can't write against a read only replica.`
    Error(String),
}

impl Reply {
    /// A status or a value as text; panics when it is none.
    #[track_caller]
    pub fn text(&self) -> String {
        match self {
            Self::Text(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            other => panic!("{other:?} is no text"),
        }
    }

    /// A number, also one that is kept as text; panics when it is none.
    #[track_caller]
    pub fn integer(&self) -> i64 {
        match self {
            Self::Integer(number) => *number,
            other => other.text().parse().unwrap_or_else(|_| panic!("{other:?} is no number")),
        }
    }

    /// What a list holds; panics when it is none.
    #[track_caller]
    pub fn list(&self) -> &[Self] {
        match self {
            Self::List(items) => items,
            other => panic!("{other:?} is no list"),
        }
    }

    /// A list of texts.
    #[track_caller]
    pub fn texts(&self) -> Vec<String> {
        self.list().iter().map(Self::text).collect()
    }
}

/// A connection that asks one thing at a time. It blocks: on a server of this machine that is shorter than any
/// change of tasks, and what a test asks between two events shall not let others happen.
pub struct Connection {
    stream: BufReader<UnixStream>,
}

impl Connection {
    /// To a server's Unix socket.
    pub(super) fn open(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(SILENCE))?;
        Ok(Self { stream: BufReader::new(stream) })
    }

    /// Asks, and reads the answer. An error is the connection's; the server's own is a [`Reply`].
    pub fn try_command(&mut self, words: &[&str]) -> io::Result<Reply> {
        let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            bytes.extend(format!("${}\r\n{word}\r\n", word.len()).into_bytes());
        }
        self.stream.get_mut().write_all(&bytes)?;
        read(&mut self.stream)
    }

    /// The same, where it has to be taken.
    #[track_caller]
    pub fn command(&mut self, words: &[&str]) -> Reply {
        match self.try_command(words) {
            Ok(Reply::Error(error)) => panic!("{words:?}: {error}"),
            Ok(reply) => reply,
            Err(error) => panic!("{words:?}: {error}"),
        }
    }
}

fn read(stream: &mut impl BufRead) -> io::Result<Reply> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let Some(line) = line.strip_suffix("\r\n") else { return Err(io::ErrorKind::UnexpectedEof.into()) };
    let (kind, rest) = line.split_at_checked(1).ok_or_else(|| garbled(line))?;
    let number = || rest.parse::<i64>().map_err(|_| garbled(line));
    Ok(match kind {
        "+" => Reply::Text(rest.into()),
        "-" => Reply::Error(rest.into()),
        ":" => Reply::Integer(number()?),
        // -1 stands for nothing at all.
        "$" => match usize::try_from(number()?) {
            Ok(length) => {
                let mut bytes = vec![0; length + 2];
                stream.read_exact(&mut bytes)?;
                bytes.truncate(length);
                Reply::Text(bytes)
            }
            Err(_) => Reply::Nil,
        },
        "*" => match number()? {
            0.. => Reply::List((0..number()?).map(|_| read(stream)).collect::<io::Result<_>>()?),
            _ => Reply::Nil,
        },
        _ => return Err(garbled(line)),
    })
}

fn garbled(line: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{line:?} is no RESP2"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_reply_is_read_to_its_end() {
        let mut bytes =
            &b"*6\r\n+OK\r\n-ERR no\r\n:-7\r\n$3\r\na\r\n\r\n$-1\r\n*2\r\n*-1\r\n*0\r\n:1\r\n"[..];
        let list = read(&mut bytes).unwrap();
        let expected = [
            Reply::Text(b"OK".to_vec()),
            Reply::Error("ERR no".to_owned()),
            Reply::Integer(-7),
            Reply::Text(b"a\r\n".to_vec()),
            Reply::Nil,
            Reply::List(vec![Reply::Nil, Reply::List(vec![])]),
        ];
        assert_eq!(list.list(), expected);
        assert_eq!(read(&mut bytes).unwrap().integer(), 1);
        assert_eq!(read(&mut bytes).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(read(&mut &b"HTTP/1.1 400\r\n"[..]).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(read(&mut &b"$5\r\nab\r\n"[..]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
}

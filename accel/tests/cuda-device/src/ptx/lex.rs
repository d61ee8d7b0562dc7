// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Words, numbers and signs of a PTX text (PTX ISA 8.8 §4).

use super::Error;

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Token<'a> {
    /// Names, directives and opcodes with their modifiers: `%rd1`, `.reg`, `ld.global.L1::no_allocate.u32`.
    Word(&'a str),
    Integer(u64),
    Single(u32),
    Double(u64),
    Text(&'a str),
    Sign(u8),
    End,
}

/// Tokens, each with its line.
pub fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, Error> {
    let mut lexer = Lexer { text, at: 0, line: 1 };
    let mut out = Vec::with_capacity(text.len() / 4);
    loop {
        let token = lexer.next()?;
        out.push((token, lexer.line));
        if token == Token::End {
            return Ok(out);
        }
    }
}

struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

impl<'a> Lexer<'a> {
    fn byte(&self, ahead: usize) -> u8 {
        *self.text.as_bytes().get(self.at + ahead).unwrap_or(&0)
    }

    fn fail<T>(&self, what: &str) -> Result<T, Error> {
        Err(Error { line: self.line, what: what.to_owned() })
    }

    fn blank(&mut self) -> Result<(), Error> {
        loop {
            match (self.byte(0), self.byte(1)) {
                (b'\n', _) => self.line += 1,
                (b' ' | b'\t' | b'\r', _) => {}
                (b'/', b'/') => {
                    self.at += self.text[self.at..].find('\n').unwrap_or(self.text.len() - self.at);
                    continue;
                }
                (b'/', b'*') => {
                    let Some(end) = self.text[self.at..].find("*/") else {
                        return self.fail("a comment does not end");
                    };
                    self.line += self.text[self.at..self.at + end].matches('\n').count() as u32;
                    self.at += end + 2;
                    continue;
                }
                _ => return Ok(()),
            }
            self.at += 1;
        }
    }

    fn next(&mut self) -> Result<Token<'a>, Error> {
        self.blank()?;
        if self.at >= self.text.len() || self.byte(0) == 0 {
            return Ok(Token::End);
        }
        let start = self.at;
        match self.byte(0) {
            b'0'..=b'9' => self.number(),
            b'"' => {
                self.at += 1;
                let Some(end) = self.text[self.at..].find('"') else {
                    return self.fail("a string does not end");
                };
                self.at += end + 1;
                Ok(Token::Text(&self.text[start + 1..self.at - 1]))
            }
            first if in_word(first) => {
                // '::' is inside of modifiers such as .shared::cta. A directive ends where the next begins: `.reg.b16`.
                while in_word(self.byte(0)) || (self.byte(0) == b':' && self.byte(1) == b':') {
                    if first == b'.' && self.at > start && self.byte(0) == b'.' {
                        break;
                    }
                    self.at += if self.byte(0) == b':' { 2 } else { 1 };
                }
                Ok(Token::Word(&self.text[start..self.at]))
            }
            sign if sign.is_ascii() => {
                self.at += 1;
                Ok(Token::Sign(sign))
            }
            _ => self.fail("not ASCII"),
        }
    }

    fn number(&mut self) -> Result<Token<'a>, Error> {
        let start = self.at;
        while self.byte(0).is_ascii_alphanumeric() {
            self.at += 1;
        }
        let word = &self.text[start..self.at];
        let digits =
            |from: usize, radix| u64::from_str_radix(word[from..].trim_end_matches(['U', 'u']), radix).ok();
        let token = match word.as_bytes().get(1) {
            Some(b'f' | b'F') if word.len() == 10 => digits(2, 16).map(|bits| Token::Single(bits as u32)),
            Some(b'd' | b'D') if word.len() == 18 => digits(2, 16).map(Token::Double),
            Some(b'x' | b'X') => digits(2, 16).map(Token::Integer),
            Some(b'b' | b'B') => digits(2, 2).map(Token::Integer),
            // A decimal fraction: 1.5, 2.0e-3.
            _ if self.byte(0) == b'.' && self.byte(1).is_ascii_digit() => {
                self.at += 1;
                while self.byte(0).is_ascii_alphanumeric()
                    || (self.byte(0) == b'-' && matches!(self.text.as_bytes()[self.at - 1], b'e' | b'E'))
                {
                    self.at += 1;
                }
                self.text[start..self.at].parse::<f64>().ok().map(|value| Token::Double(value.to_bits()))
            }
            Some(b'0'..=b'7') if word.starts_with('0') => digits(1, 8).map(Token::Integer),
            _ => digits(0, 10).map(Token::Integer),
        };
        match token {
            Some(token) => Ok(token),
            None => self.fail(&format!("not a number: {word}")),
        }
    }
}

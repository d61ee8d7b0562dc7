// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Directives, declarations and instructions (PTX ISA 8.8 §4.3, §5.4, §11).

use super::Error;
use super::ast::{Function, Guard, Init, Instruction, Module, Operand, Space, Statement, Variable};
use super::instructions::INSTRUCTIONS;
use super::lex::{Token, tokens};
use super::types::Ty;

pub fn parse(text: &str) -> Result<Module, Error> {
    let mut parser = Parser { tokens: tokens(text)?, at: 0 };
    let mut module = Module::default();
    while parser.peek() != Token::End {
        parser.directive(&mut module)?;
    }
    Ok(module)
}

struct Parser<'a> {
    tokens: Vec<(Token<'a>, u32)>,
    at: usize,
}

fn space(word: &str) -> Option<Space> {
    Some(match word {
        ".global" => Space::Global,
        ".shared" => Space::Shared,
        ".local" => Space::Local,
        ".const" => Space::Const,
        ".param" => Space::Param,
        _ => return None,
    })
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Token<'a> {
        self.tokens[self.at.min(self.tokens.len() - 1)].0
    }

    fn line(&self) -> u32 {
        self.tokens[self.at.min(self.tokens.len() - 1)].1
    }

    fn take(&mut self) -> Token<'a> {
        let token = self.peek();
        self.at += 1;
        token
    }

    fn fail<T>(&self, what: impl Into<String>) -> Result<T, Error> {
        Err(Error { line: self.line(), what: what.into() })
    }

    fn sign(&mut self, sign: u8) -> Result<(), Error> {
        if self.accept(sign) {
            Ok(())
        } else {
            self.fail(format!("expected '{}', found {:?}", char::from(sign), self.peek()))
        }
    }

    fn accept(&mut self, sign: u8) -> bool {
        let found = self.peek() == Token::Sign(sign);
        self.at += usize::from(found);
        found
    }

    fn word(&mut self) -> Result<&'a str, Error> {
        match self.peek() {
            Token::Word(word) => {
                self.at += 1;
                Ok(word)
            }
            other => self.fail(format!("expected a name, found {other:?}")),
        }
    }

    fn accept_word(&mut self, word: &str) -> bool {
        let found = self.peek() == Token::Word(word);
        self.at += usize::from(found);
        found
    }

    fn integer(&mut self) -> Result<u64, Error> {
        let negative = self.accept(b'-');
        match self.take() {
            Token::Integer(value) => Ok(if negative { value.wrapping_neg() } else { value }),
            other => self.fail(format!("expected a number, found {other:?}")),
        }
    }

    fn skip_to(&mut self, sign: u8) {
        while self.peek() != Token::End && !self.accept(sign) {
            self.at += 1;
        }
    }

    fn skip_braces(&mut self) {
        let mut depth = 0;
        while self.peek() != Token::End {
            match self.take() {
                Token::Sign(b'{') => depth += 1,
                Token::Sign(b'}') if depth == 1 => return,
                Token::Sign(b'}') => depth -= 1,
                _ => {}
            }
        }
    }

    fn directive(&mut self, module: &mut Module) -> Result<(), Error> {
        let mut external = false;
        loop {
            match self.word()? {
                ".version" => {
                    // 8.8 is read as a fraction, whose digits count one by one: 8.10 does not exist yet.
                    if let Token::Double(bits) = self.take() {
                        let tenths = (f64::from_bits(bits) * 10.0).round() as u32;
                        module.version = (tenths / 10, tenths % 10);
                    }
                    return Ok(());
                }
                ".target" => {
                    module.target = self.word()?.to_owned();
                    while self.accept(b',') {
                        self.word()?;
                    }
                    return Ok(());
                }
                ".address_size" => {
                    return match self.integer()? {
                        64 => Ok(()),
                        _ => self.fail("only .address_size 64 is supported"),
                    };
                }
                ".file" => {
                    self.integer()?;
                    self.take();
                    while self.accept(b',') {
                        self.take();
                    }
                    return Ok(());
                }
                ".section" => {
                    self.skip_braces();
                    return Ok(());
                }
                ".pragma" => {
                    self.skip_to(b';');
                    return Ok(());
                }
                ".alias" => {
                    let name = self.word()?.to_owned();
                    self.sign(b',')?;
                    module.aliases.push((name, self.word()?.to_owned()));
                    return self.sign(b';');
                }
                ".extern" => external = true,
                ".visible" | ".weak" | ".common" => {}
                ".entry" => return self.function(true, module),
                ".func" => return self.function(false, module),
                word => match space(word) {
                    Some(space) => {
                        let variables = self.variables(space, external)?;
                        module.variables.extend(variables);
                        return Ok(());
                    }
                    None => return self.fail(format!("unknown directive {word}")),
                },
            }
        }
    }

    /// What follows `.entry` or `.func`.
    fn function(&mut self, entry: bool, module: &mut Module) -> Result<(), Error> {
        let mut function = Function { entry, line: self.line(), ..Function::default() };
        self.accept_word(".noreturn");
        if self.peek() == Token::Sign(b'(') {
            function.results = self.parameters()?;
        }
        function.name = self.word()?.to_owned();
        if self.peek() == Token::Sign(b'(') {
            function.parameters = self.parameters()?;
        }
        loop {
            match self.peek() {
                Token::Sign(b';') => {
                    self.at += 1;
                    break;
                }
                Token::Sign(b'{') => {
                    self.at += 1;
                    function.body = Some(self.body()?);
                    break;
                }
                Token::Word(".maxntid") => {
                    self.at += 1;
                    function.max_threads = Some(self.sizes()?);
                }
                Token::Word(".reqntid") => {
                    self.at += 1;
                    function.required_threads = Some(self.sizes()?);
                }
                Token::Word(".pragma") => self.skip_to(b';'),
                Token::Word(".noreturn" | ".explicitcluster") => self.at += 1,
                // .minnctapersm, .maxnreg and the like: advice, or limits that this device does not have.
                Token::Word(word) if word.starts_with('.') => {
                    self.at += 1;
                    self.sizes()?;
                }
                other => {
                    return self.fail(format!("unexpected {other:?} after the head of {}", function.name));
                }
            }
        }
        module.functions.push(function);
        Ok(())
    }

    fn sizes(&mut self) -> Result<[u32; 3], Error> {
        let mut sizes = [1; 3];
        for size in &mut sizes {
            if !matches!(self.peek(), Token::Integer(_)) {
                break;
            }
            *size = self.integer()? as u32;
            if !self.accept(b',') {
                break;
            }
        }
        Ok(sizes)
    }

    fn parameters(&mut self) -> Result<Vec<Variable>, Error> {
        self.sign(b'(')?;
        let mut out = Vec::new();
        while !self.accept(b')') {
            match self.word()? {
                ".param" => out.push(self.variable(Space::Param, false)?),
                word => return self.fail(format!("parameters in {word} are not supported: use .param")),
            }
            self.accept(b',');
        }
        Ok(out)
    }

    /// One or more variables after their state space, to the semicolon.
    fn variables(&mut self, space: Space, external: bool) -> Result<Vec<Variable>, Error> {
        let first = self.variable(space, external)?;
        let mut out = vec![first];
        while self.accept(b',') {
            let mut next = out[0].clone();
            next.init.clear();
            next.size = next.element;
            self.declarator(&mut next)?;
            out.push(next);
        }
        self.sign(b';')?;
        Ok(out)
    }

    /// Alignment, type, name, dimensions and value of a variable.
    fn variable(&mut self, space: Space, external: bool) -> Result<Variable, Error> {
        let mut variable = Variable {
            name: String::new(),
            space,
            align: 0,
            size: 0,
            init: Vec::new(),
            external,
            managed: false,
            element: 0,
        };
        let mut lanes = 1;
        loop {
            match self.word()? {
                ".align" => variable.align = self.integer()? as usize,
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                ".attribute" => {
                    self.sign(b'(')?;
                    variable.managed |= self.word()? == ".managed";
                    self.skip_to(b')');
                }
                // `.param .u64 .ptr .global .align 1 name`: what a pointer parameter points to.
                ".ptr" => {
                    if matches!(self.peek(), Token::Word(word) if space_or_generic(word)) {
                        self.at += 1;
                    }
                    if self.accept_word(".align") {
                        self.integer()?;
                    }
                    break;
                }
                ".texref" | ".samplerref" | ".surfref" => {
                    (variable.element, variable.align) = (8, 8);
                    break;
                }
                word => match word.strip_prefix('.').and_then(Ty::parse) {
                    Some(ty) => {
                        variable.element = ty.size() * lanes;
                        if self.peek() != Token::Word(".ptr") {
                            break;
                        }
                    }
                    None => return self.fail(format!("unknown type {word}")),
                },
            }
        }
        variable.align = if variable.align == 0 { variable.element } else { variable.align };
        variable.size = variable.element;
        self.declarator(&mut variable)?;
        Ok(variable)
    }

    fn declarator(&mut self, variable: &mut Variable) -> Result<(), Error> {
        // Prototypes of calls have '_' or no name.
        if let Token::Word(name) = self.peek() {
            variable.name = name.to_owned();
            self.at += 1;
        }
        let mut open = false;
        while self.accept(b'[') {
            match self.peek() {
                Token::Sign(b']') => open = true,
                _ => variable.size = variable.size.saturating_mul(self.integer()? as usize),
            }
            self.sign(b']')?;
        }
        if self.accept(b'=') {
            self.initializer(&mut variable.init)?;
            if open {
                variable.size = variable.element * variable.init.len();
            }
        } else if open {
            variable.size = 0;
        }
        Ok(())
    }

    fn initializer(&mut self, out: &mut Vec<Init>) -> Result<(), Error> {
        if self.accept(b'{') {
            while !self.accept(b'}') {
                self.initializer(out)?;
                self.accept(b',');
            }
            return Ok(());
        }
        let negative = self.accept(b'-');
        let sign = |bits: u64| if negative { bits.wrapping_neg() } else { bits };
        let init = match self.take() {
            Token::Integer(mask) if self.accept(b'(') => {
                let Init::Symbol { name, generic, offset, .. } = self.symbol()? else {
                    return self.fail("a mask needs a symbol");
                };
                self.sign(b')')?;
                Init::Symbol { name, generic, offset, mask: Some(mask) }
            }
            Token::Integer(bits) => Init::Bits(sign(bits)),
            Token::Single(bits) => Init::Bits(u64::from(bits)),
            Token::Double(bits) => Init::Bits(bits),
            _ => {
                self.at -= 1;
                self.symbol()?
            }
        };
        out.push(init);
        Ok(())
    }

    /// `name`, `name+4`, `generic(name)+4`.
    fn symbol(&mut self) -> Result<Init, Error> {
        let mut name = self.word()?;
        let generic = name == "generic";
        if generic {
            self.sign(b'(')?;
            name = self.word()?;
            self.sign(b')')?;
        }
        let offset = if self.accept(b'+') { self.integer()? as i64 } else { 0 };
        Ok(Init::Symbol { name: name.to_owned(), generic, offset, mask: None })
    }

    fn body(&mut self) -> Result<Vec<Statement>, Error> {
        let mut out = Vec::new();
        let mut depth = 0;
        loop {
            match self.peek() {
                Token::Sign(b'{') => {
                    depth += 1;
                    self.at += 1;
                    out.push(Statement::Open);
                }
                Token::Sign(b'}') => {
                    self.at += 1;
                    if depth == 0 {
                        return Ok(out);
                    }
                    depth -= 1;
                    out.push(Statement::Close);
                }
                Token::Sign(b';') => self.at += 1,
                Token::End => return self.fail("a body does not end"),
                Token::Sign(b'@') => {
                    let instruction = self.instruction()?;
                    out.push(Statement::Instruction(instruction));
                }
                Token::Word(word) => self.statement(word, &mut out)?,
                other => return self.fail(format!("unexpected {other:?}")),
            }
        }
    }

    fn statement(&mut self, word: &'a str, out: &mut Vec<Statement>) -> Result<(), Error> {
        match word {
            ".reg" => {
                self.at += 1;
                self.registers(out)?;
            }
            ".loc" => {
                // .loc FILE LINE COLUMN [, function_name NAME [+ N], inlined_at FILE LINE COLUMN]
                let line = self.line();
                while self.line() == line {
                    self.at += 1;
                }
            }
            ".pragma" => self.skip_to(b';'),
            ".file" | ".section" => return self.fail(format!("{word} inside a function")),
            _ if space(word).is_some() => {
                self.at += 1;
                let variables = self.variables(space(word).unwrap_or(Space::Local), false)?;
                out.extend(variables.into_iter().map(Statement::Variable));
            }
            _ if self.tokens.get(self.at + 1).map(|next| next.0) == Some(Token::Sign(b':')) => {
                self.at += 2;
                match self.peek() {
                    Token::Word(".branchtargets") => {
                        self.at += 1;
                        let mut labels = vec![self.word()?.to_owned()];
                        while self.accept(b',') {
                            labels.push(self.word()?.to_owned());
                        }
                        self.sign(b';')?;
                        out.push(Statement::Targets { name: word.to_owned(), labels });
                    }
                    Token::Word(".callprototype" | ".calltargets") => self.skip_to(b';'),
                    _ => out.push(Statement::Label(word.to_owned())),
                }
            }
            _ => {
                let instruction = self.instruction()?;
                out.push(Statement::Instruction(instruction));
            }
        }
        Ok(())
    }

    fn registers(&mut self, out: &mut Vec<Statement>) -> Result<(), Error> {
        let word = self.word()?;
        let Some(ty) = word.strip_prefix('.').and_then(Ty::parse) else {
            return self.fail(format!("unknown type {word}"));
        };
        loop {
            let name = self.word()?.to_owned();
            let count = if self.accept(b'<') {
                let count = self.integer()? as u32;
                self.sign(b'>')?;
                Some(count)
            } else {
                None
            };
            out.push(Statement::Registers { name, count, ty });
            if !self.accept(b',') {
                return self.sign(b';');
            }
        }
    }

    fn instruction(&mut self) -> Result<Instruction, Error> {
        let line = self.line();
        let mut guard = None;
        if self.accept(b'@') {
            let negated = self.accept(b'!');
            guard = Some(Guard { name: self.word()?.to_owned(), negated });
        }
        let opcode = self.word()?;
        let mut parts = opcode.split('.');
        let name = parts.next().unwrap_or_default().to_owned();
        if INSTRUCTIONS.binary_search(&name.as_str()).is_err() {
            return Err(Error { line, what: format!("unknown instruction {name}") });
        }
        let modifiers = parts.map(str::to_owned).collect();
        let mut operands = Vec::new();
        while !self.accept(b';') {
            operands.push(self.operand()?);
            if !self.accept(b',') {
                self.sign(b';')?;
                break;
            }
        }
        Ok(Instruction { line, guard, name, modifiers, operands })
    }

    fn list(&mut self, end: u8) -> Result<Vec<Operand>, Error> {
        let mut out = Vec::new();
        while !self.accept(end) {
            out.push(self.operand()?);
            self.accept(b',');
        }
        Ok(out)
    }

    fn operand(&mut self) -> Result<Operand, Error> {
        let operand = match self.take() {
            Token::Sign(b'{') => Operand::Vector(self.list(b'}')?),
            Token::Sign(b'(') => Operand::List(self.list(b')')?),
            Token::Sign(b'[') => {
                let mut parts = self.list(b']')?.into_iter();
                let Some(base) = parts.next() else { return self.fail("an empty address") };
                let (base, offset) = match base {
                    Operand::Offset(name, offset) => (Operand::Name(name), offset),
                    base => (base, 0),
                };
                Operand::Memory { base: Box::new(base), offset, more: parts.collect() }
            }
            Token::Sign(b'!') => Operand::Not(self.word()?.to_owned()),
            Token::Sign(b'-') => match self.take() {
                Token::Integer(value) => Operand::Integer(value.wrapping_neg()),
                Token::Single(bits) => Operand::Single(bits ^ 1 << 31),
                Token::Double(bits) => Operand::Double(bits ^ 1 << 63),
                Token::Word(name) => Operand::Negative(name.to_owned()),
                other => return self.fail(format!("unexpected {other:?} after '-'")),
            },
            Token::Integer(value) => Operand::Integer(value),
            Token::Single(bits) => Operand::Single(bits),
            Token::Double(bits) => Operand::Double(bits),
            Token::Word("_") => Operand::Sink,
            Token::Word(name) if self.accept(b'+') => {
                Operand::Offset(name.to_owned(), self.integer()? as i64)
            }
            // The address of an element of an array; only of the first, which needs no element's size.
            Token::Word(name) if self.accept(b'[') => match self.list(b']')?.as_slice() {
                [Operand::Integer(0)] => Operand::Name(name.to_owned()),
                _ => return self.fail(format!("an element of {name} other than the first, as an operand")),
            },
            Token::Word(name) if self.peek() == Token::Sign(b'-') => {
                Operand::Offset(name.to_owned(), self.integer()? as i64)
            }
            Token::Word(name) => Operand::Name(name.to_owned()),
            other => return self.fail(format!("unexpected {other:?} as an operand")),
        };
        if self.accept(b'|') {
            return Ok(Operand::Pair(Box::new(operand), Box::new(self.operand()?)));
        }
        Ok(operand)
    }
}

fn space_or_generic(word: &str) -> bool {
    word == ".generic" || space(word).is_some()
}

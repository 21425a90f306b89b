// Evaluates the inline PTX of a converter on the host. Every `asm` statement of the tree becomes a call of execute() before its header is
// compiled, so what runs is the tree's own text: which operand goes where, which byte comes first, what is done before and after. The few
// instructions mean what the PTX ISA says of them; whether a GPU does the same is settled there (G2). Any other instruction ends the
// program with UNREADABLE.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

namespace sparkwright::ptx {

constexpr int UNREADABLE = 42;

[[noreturn]] inline void unreadable(std::string const& what) {
  std::fprintf(stderr, "unreadable: %s\n", what.c_str());
  std::exit(UNREADABLE);
}

// One operand of an asm statement: its bits, and where they go if it is written.
struct Operand {
  void* target;
  std::size_t size;
  std::uint64_t bits;
};

template <class T>
Operand read(T value) {
  static_assert(sizeof(T) <= 8, "an operand has at most 64 bits");
  Operand operand{nullptr, sizeof(T), 0};
  std::memcpy(&operand.bits, &value, sizeof(T));
  return operand;
}

template <class T>
Operand write(T& value) {
  static_assert(sizeof(T) <= 8, "an operand has at most 64 bits");
  return {&value, sizeof(T), 0};
}

template <class T>
Operand update(T& value) {
  Operand operand = read(value);
  operand.target = &value;
  return operand;
}

// An argument of an instruction: one name, or several in braces.
using Argument = std::vector<std::string>;

struct Instruction {
  std::string name;
  std::vector<Argument> arguments;
};

using Program = std::vector<Instruction>;

inline std::string trimmed(std::string const& text) {
  auto const first = text.find_first_not_of(" \t\r\n");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t\r\n") - first + 1);
}

inline Instruction instruction(std::string const& statement) {
  auto const end = statement.find_first_of(" \t\r\n");
  Instruction made{statement.substr(0, end), {}};
  bool braces = false;
  Argument argument;
  std::string word;
  auto const ended = [&](bool whole) {
    if (!trimmed(word).empty()) argument.push_back(trimmed(word));
    word.clear();
    if (whole && !argument.empty()) made.arguments.push_back(argument), argument.clear();
  };
  for (char const letter : end == std::string::npos ? "" : statement.substr(end)) {
    if (letter == '{') braces = true;
    else if (letter == '}') braces = false;
    else if (letter == ',') ended(!braces);
    else word += letter;
  }
  ended(true);
  return made;
}

// Returns the statements of `text`; braces between them only open and close a scope.
inline Program parsed(std::string const& text) {
  Program program;
  std::size_t at = 0;
  while ((at = text.find_first_not_of(" \t\r\n{};", at)) != std::string::npos) {
    auto const end = text.find(';', at);
    if (end == std::string::npos) unreadable("a statement without an end: " + trimmed(text.substr(at)));
    program.push_back(instruction(text.substr(at, end - at)));
    at = end;
  }
  return program;
}

inline float as_float(std::uint64_t bits) {
  auto const low = static_cast<std::uint32_t>(bits);
  float value;
  std::memcpy(&value, &low, 4);
  return value;
}

// To the nearest E2M1 value, a tie to the even code, beyond 6 to 6, NaN to +6 (PTX ISA, cvt with .satfinite).
inline std::uint64_t e2m1(float value) {
  if (std::isnan(value)) return 7;
  float const size = std::fabs(value);
  int const code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) + (size > 5.0f);
  return static_cast<std::uint64_t>(code | (std::signbit(value) ? 8 : 0));
}

// The correctly rounded quotient, subnormals taken as zero; rcp.approx is within 1 ulp of it.
inline std::uint64_t reciprocal(std::uint64_t bits) {
  float value = as_float(bits);
  if (std::fpclassify(value) == FP_SUBNORMAL) value = std::copysign(0.0f, value);
  float made = 1.0f / value;
  if (std::fpclassify(made) == FP_SUBNORMAL) made = std::copysign(0.0f, made);
  std::uint32_t out;
  std::memcpy(&out, &made, 4);
  return out;
}

class Machine {
 public:
  Machine(Program const& program, std::vector<Operand>& operands) : operands_(operands) {
    for (auto const& one : program) step(one);
  }

 private:
  struct Register {
    std::size_t size = 0;
    std::uint64_t bits = 0;
    bool set = false;
  };

  std::vector<Operand>& operands_;
  std::map<std::string, Register> registers_;

  Operand* operand(std::string const& name) {
    if (name.size() < 2 || name[0] != '%' || name[1] < '0' || name[1] > '9') return nullptr;
    auto const index = std::stoul(name.substr(1));
    if (index >= operands_.size() || name != "%" + std::to_string(index)) unreadable("no operand " + name);
    return &operands_[index];
  }

  Register& known(std::string const& name) {
    auto const found = registers_.find(name);
    if (found == registers_.end()) unreadable("no register " + name);
    return found->second;
  }

  std::size_t size(std::string const& name) {
    auto* const given = operand(name);
    return given ? given->size : known(name).size;
  }

  // Integers, and floats as their bits (PTX ISA, "Constants").
  static std::uint64_t constant(std::string const& text) {
    bool const bits = text.size() == 10 && (text.rfind("0f", 0) == 0 || text.rfind("0F", 0) == 0);
    char* end = nullptr;
    auto const value = bits ? std::strtoull(text.c_str() + 2, &end, 16) : std::strtoull(text.c_str(), &end, 0);
    if (*end) unreadable("constant " + text);
    return value;
  }

  std::uint64_t get(std::string const& name, std::size_t wanted) {
    if (name[0] >= '0' && name[0] <= '9') return constant(name);
    if (size(name) != wanted) unreadable(name + " has another size");
    if (auto* const given = operand(name)) return given->bits;
    if (!known(name).set) unreadable(name + " is read before it is written");
    return known(name).bits;
  }

  void set(std::string const& name, std::size_t wanted, std::uint64_t bits) {
    if (size(name) != wanted) unreadable(name + " has another size");
    if (auto* const given = operand(name)) {
      if (!given->target) unreadable(name + " is only read");
      given->bits = bits;
      std::memcpy(given->target, &given->bits, wanted);
      return;
    }
    known(name) = {wanted, bits, true};
  }

  static std::size_t bytes(std::string const& type) {
    static std::map<std::string, std::size_t> const sizes{{"8", 1}, {"16", 2}, {"32", 4}, {"64", 8}};
    auto const found = type.size() < 2 || !std::strchr("bufs", type[0]) ? sizes.end() : sizes.find(type.substr(1));
    if (found == sizes.end()) unreadable("type ." + type);
    return found->second;
  }

  static Argument const& only(Instruction const& one, std::size_t index) { return one.arguments.at(index); }

  static std::string const& single(Instruction const& one, std::size_t index) {
    if (only(one, index).size() != 1) unreadable(one.name + " with a vector");
    return only(one, index)[0];
  }

  void move(Instruction const& one, std::size_t whole) {
    auto const& to = only(one, 0);
    auto const& from = only(one, 1);
    if (from.size() > 1 && to.size() > 1) unreadable(one.name + " between vectors");
    std::size_t const part = whole / (from.size() > to.size() ? from.size() : to.size());
    std::uint64_t bits = 0;
    // The first of a vector is the least significant part (PTX ISA, mov).
    for (std::size_t i = 0; i < from.size(); ++i) bits |= get(from[i], from.size() > 1 ? part : whole) << (8 * part * i);
    for (std::size_t i = 0; i < to.size(); ++i) {
      std::uint64_t const mask = to.size() > 1 ? (std::uint64_t{1} << (8 * part)) - 1 : ~std::uint64_t{0};
      set(to[i], to.size() > 1 ? part : whole, (bits >> (8 * part * i)) & mask);
    }
  }

  void step(Instruction const& one) {
    auto const count = one.arguments.size();
    auto const is = [&](char const* name, std::size_t arguments) { return one.name == name && count == arguments; };
    if (one.name == ".reg" && count) {
      declare(one);
    } else if (is("cvt.rn.satfinite.e2m1x2.f32", 3)) {
      // The first source goes to the upper four bits.
      set(single(one, 0), 1, e2m1(as_float(get(single(one, 1), 4))) << 4 | e2m1(as_float(get(single(one, 2), 4))));
    } else if (is("rcp.approx.ftz.f32", 2)) {
      set(single(one, 0), 4, reciprocal(get(single(one, 1), 4)));
    } else if (one.name.rfind("mov.", 0) == 0 && count == 2) {
      move(one, bytes(one.name.substr(4)));
    } else {
      unreadable("instruction " + one.name);
    }
  }

  void declare(Instruction const& one) {
    for (std::size_t i = 0; i < one.arguments.size(); ++i) {
      // ".b8 name" is one argument: the type stands before the first name.
      auto const& text = single(one, i);
      auto const blank = text.find_first_of(" \t\r\n");
      if ((i == 0) != (text[0] == '.') || (i == 0 && blank == std::string::npos)) unreadable("declaration " + text);
      if (i == 0) declared_ = bytes(text.substr(1, blank - 1));
      registers_[i == 0 ? trimmed(text.substr(blank)) : text] = {declared_, 0, false};
    }
  }

  std::size_t declared_ = 0;
};

// Runs the statements of `text`, whose %0, %1 … are `operands`: those that are written first, as in an asm statement.
inline void execute(char const* text, std::initializer_list<Operand> operands) {
  static std::map<std::string, Program> known;
  if (known.empty()) std::fputs("inline PTX was evaluated\n", stderr);
  auto found = known.find(text);
  if (found == known.end()) found = known.emplace(text, parsed(text)).first;
  std::vector<Operand> own(operands);
  Machine(found->second, own);
}

}  // namespace sparkwright::ptx
